"""Unlimited-OCR."""
