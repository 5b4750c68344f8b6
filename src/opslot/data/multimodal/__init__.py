"""Conversations with images, video and audio: reading them, encoding them with a processor, and batches of them."""
