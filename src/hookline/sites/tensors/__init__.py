"""Put hooks on tensors, parameters, graph nodes and saved tensors."""
