"""What each key of a `config.json` that is no field may hold: one table for each object of each model's file.

Principle: a key is a field of the config, or it is fixed (the model is computed with one value of it, and another value
is refused by name), or it is known not to touch inference (ignored), or it is unknown and refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# ---- language models: M2, and the text part of M3

# Key -> the values under which the model is computed as in this package; the first is named in a refusal.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    # Published keys of both models.
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "use_qk_norm": (True,),
    "tie_word_embeddings": (False,),
    # Attention.
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "use_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "sliding_window": (None, 0, False),
    "use_sliding_window": (False,),
    "attn_window_size": (None, 0, False),
    "attention_sinks": (None, 0, False),
    "use_attention_sinks": (False,),
    "attn_sinks": (None, 0, False),
    "logit_softcap": (None, 0, False),
    "logit_softcapping": (None, 0, False),
    "attn_logit_softcap": (None, 0, False),
    "attn_logit_softcapping": (None, 0, False),
    "final_logit_softcap": (None, 0, False),
    "final_logit_softcapping": (None, 0, False),
    "router_logit_softcapping": (None, 0, False),
    "attention_output_gate": (False,),
    "attn_output_gate": (False,),
    "is_causal": (True,),
    "use_rope": (True,),
    "rope_interleave": (False,),
    # Experts.
    "norm_topk_prob": (True,),
    "n_group": (1,),
    "num_expert_group": (1,),
    "topk_group": (1,),
    # Norms and scales around the layers.
    "postnorm": (False,),
    "layernorm_full_attention_alpha": (1,),
    "layernorm_full_attention_beta": (1,),
    "layernorm_linear_attention_alpha": (1,),
    "layernorm_linear_attention_beta": (1,),
    "layernorm_mlp_alpha": (1,),
    "layernorm_mlp_beta": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    # transformers: every config may carry these.
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
}

# Group -> keys that do not touch inference, separated by spaces.
_HARMLESS_GROUPS: Mapping[str, str] = {
    "bookkeeping, labels and output switches that transformers writes into any config, old or new": (
        "architectures auto_map transformers_version name_or_path use_cache return_dict output_hidden_states "
        "output_attentions torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder "
        "tie_encoder_decoder tie_last_hidden_states cross_attention_hidden_size attn_implementation "
        "experts_implementation gradient_checkpointing id2label label2id num_labels problem_type finetuning_task "
        "task_specific_params tokenizer_class prefix bos_token_id pad_token_id sep_token_id decoder_start_token_id"
    ),
    "training": (
        "initializer_range attention_dropout hidden_dropout router_aux_loss_coef router_jitter_noise "
        "output_router_logits"
    ),
    "multi-token prediction: announced, its tensors were never published": (
        "use_mtp num_mtp_modules mtp_transformer_layers num_nextn_predict_layers"
    ),
    "a re-exporter's marks": "unsloth_fixed unsloth_version",
    "sampling values that old configs carry; generation_config.json is where they are read": (
        "max_length max_new_tokens min_length early_stopping do_sample num_beams num_beam_groups num_return_sequences "
        "temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff diversity_penalty repetition_penalty "
        "encoder_repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
        "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
        "suppress_tokens begin_suppress_tokens output_scores return_dict_in_generate num_assistant_tokens "
        "num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind"
    ),
}
_HARMLESS = frozenset(key for keys in _HARMLESS_GROUPS.values() for key in keys.split())

# ---- M2

M2_FIXED: Mapping[str, tuple[Any, ...]] = {
    **_FIXED,
    "hidden_act": ("silu",),
    "qk_norm_type": ("per_layer",),
    "shared_intermediate_size": (0,),
    "sparse_attention_config": (None, {}, False),
    "routed_scaling_factor": (1,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "first_k_dense_replace": (0,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "swiglu_limit": (None,),
    "swiglu_alpha": (None,),
    "use_gemma_norm": (False,),
}

# One value for each layer; a plain value stands for every layer.
M2_PER_LAYER: Mapping[str, Any] = {
    "attn_type_list": 1,  # 0 would be lightning attention
    "layer_types": "full_attention",
    "mlp_layer_types": "sparse",
    "moe_layer_freq": 1,
}

M2_HARMLESS = _HARMLESS | {
    # Of M2's first release, without effect: a dense width though every layer has experts, the gate of the absent shared
    # expert, grouping (the number of groups is checked), the rope base of the absent windowed layers.
    "mlp_intermediate_size",
    "shared_moe_mode",
    "use_grouped_topk",
    "swa_rope_theta",
}

# ---- M3: text_config, its sparse_attention_config, vision_config, and the object around them

M3_TEXT_FIXED: Mapping[str, tuple[Any, ...]] = {
    **_FIXED,
    "model_type": ("minimax_m3_vl_text",),  # absent in the published file
    "hidden_act": ("swigluoai", "silu"),  # transformers writes "silu" and computes SwiGLU-OAI all the same
    "qk_norm_type": ("per_head",),
    "use_gemma_norm": (True,),
    "n_shared_experts": (1,),
    "num_shared_experts": (1,),
    "index_local_blocks": (1,),
    # Servers' options for sharing one selection among layers: an approximation.
    "use_index_cache": (False,),
    "index_topk_freq": (1,),
}
M3_TEXT_HARMLESS = _HARMLESS

M3_SPARSE_FIXED: Mapping[str, tuple[Any, ...]] = {
    "use_sparse_attention": (True,),
    "sparse_init_block": (0,),
    "sparse_local_block": (1,),
    "sparse_score_type": ("max",),
}

M3_VISION_FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("clip_vision_model", "minimax_m3_vl_vision"),  # published; transformers'
    "hidden_act": ("gelu",),
    "num_channels": (3,),
    "position_embedding_type": ("rope",),
    "rope_mode": ("3d",),
    **{key: _FIXED[key] for key in ("is_encoder_decoder", "add_cross_attention", "pruned_heads", "per_layer_config")},
}
# Sizes of a CLIP that this tower is not, and its dtype: the tensors have their own.
M3_VISION_HARMLESS = _HARMLESS | {
    "image_size",
    "projection_dim",
    "vocab_size",
    "initializer_factor",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
}

M3_COMPRESSION_FIXED: Mapping[str, tuple[Any, ...]] = {"image_token_compression_method": ("patch_merge",)}

M3_ROOT_FIXED: Mapping[str, tuple[Any, ...]] = {
    "tie_word_embeddings": (False,),
    "num_reward_heads": (0,),
    "multimodal_projector_bias": (True,),
    "projector_hidden_act": ("gelu",),
    "process_image_mode": ("dynamic_res",),
    "vision_feature_layer": (-1,),
    "vision_feature_select_strategy": ("full",),
    **{key: _FIXED[key] for key in ("is_encoder_decoder", "add_cross_attention", "pruned_heads", "per_layer_config")},
}
M3_ROOT_HARMLESS = _HARMLESS | {"image_seq_length", "image_grid_pinpoints"}
