"""What a run measured in; its directory out: records, pictures, and what other trackers are told."""
