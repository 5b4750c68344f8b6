"""Encoders of images, videos and audio in a model, and the sequences around them."""
