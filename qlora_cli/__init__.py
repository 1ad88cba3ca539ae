"""QLoRA fine-tuning with a paged AdamW whose paging is set in a recipe, visible, and exact."""

__version__ = "0.1.0"
