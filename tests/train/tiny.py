"""The smallest models of each kind."""

SMALL = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
         "num_recursions": 2}  # fmt: skip
EXPERT = {"router": "expert_choice", "cap_warmup_steps": 6}
TOKEN = {"router": "token_choice", "balance": "loss_free", "bias_update_rate": 0.01}
FIXED = {"router": "none"}
