"""The names of the fields of OpenAI's API and of vLLM's, as their packages list them."""


def _names(text: str) -> list[str]:
    return text.split()


OPENAI_VERSION, VLLM_VERSION = "3.57", "0.32"

OPENAI_CHAT = _names(
    """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
top_logprobs top_p user verbosity web_search_options
"""
)

OPENAI_COMPLETIONS = _names(
    """
best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed
stop stream stream_options suffix temperature top_p user
"""
)

VLLM_BOTH = _names(
    """
add_special_tokens allowed_token_ids bad_words cache_salt detokenize ec_transfer_params echo
frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias
logprob_token_ids logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority
prompt_logprobs repetition_detection repetition_penalty request_id response_format
return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
stop_token_ids stream stream_interval stream_options structured_outputs temperature
thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user
vllm_xargs watermarking
"""
)
"""`detokenize` is one of vLLM's sampling parameters, which some clients send."""

VLLM_CHAT = [
    *VLLM_BOTH,
    *_names(
        """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
include_reasoning max_completion_tokens media_io_kwargs messages mm_processor_kwargs
parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs
"""
    ),
]

VLLM_COMPLETIONS = [*VLLM_BOTH, "prompt", "prompt_embeds", "suffix"]
