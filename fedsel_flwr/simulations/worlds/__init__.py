"""What a simulated federation is made of: data, partitions, model, availability."""
