"""Facts in, loops out: which loop computes what (loop fission), as late as its readers allow."""
