"""What tests share: models, rules, and real ranks."""
