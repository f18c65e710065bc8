"""Of what one example consists: images as they came, lengths that vary, a function of the user."""
