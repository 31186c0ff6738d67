"""Shape letters, fixed here and used in every comment, docstring and variable name of both packages.

    B  batch: rows of a step (slots)          N  B * T tokens of a step, flattened
    T  tokens of one row in one step          S  tokens of one page of the cache
    D  hidden_size                            P  pages of the cache on one device
    H  query heads                            L  layers
    K  key/value heads                        V  vocabulary
    h  head_dim                               R  N * num_experts_per_tok routed rows
    E  experts
    F  expert width (intermediate_size)

Inside `shard_map` the same letters mean a device's part; a docstring says "local" where it matters.
"""
