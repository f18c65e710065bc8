"""The steps of the pipeline as KFP components, and the code that runs inside them."""
