"""An inference engine: many texts at once, each as if it were alone. In: a model, requests. Out: ids as they come."""
