"""What a run measured in; its directory out: records, pictures, a summary, and what other trackers are told."""
