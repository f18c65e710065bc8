"""Learning tasks: what is predicted, by which loss, and how well."""
