"""Writes a model's weights as quantized checkpoints, in the layouts that are published: what is measured or tested is
then read as any checkpoint is. Every number is rounded to the nearest that its format has: nothing is calibrated but
where a format stores scales of activations."""
