"""From logits to tokens: penalties, filters, draws and log-probabilities, on any device."""
