"""Unlimited-OCR."""

from opslot.models._registry import register_architecture

register_architecture("unlimited_ocr")
