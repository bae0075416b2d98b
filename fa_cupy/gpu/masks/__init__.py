"""Masks on a device."""
