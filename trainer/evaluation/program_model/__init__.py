"""Load the model of a user's program as a Keras model of Flotilla."""
