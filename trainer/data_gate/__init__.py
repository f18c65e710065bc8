"""The gate on data: a dataset next to the champion's, rules, and what a person reads of them."""
