"""The sentences of `explain` in English, by key; `zh.yaml` has the same keys."""

TEXTS: dict[str, str] = {
    # steps
    "explain_step_input_token": "The ids of the tokens go in, such as 101, 2312, 4324, 743, 664.",
    "explain_step_input_segment": (
        "The ids of the sentences go in, such as 0, 0, 0, 1, 1: first and second sentence; all zeros for one sentence."
    ),
    "explain_step_embedding_token": (
        "A lookup: every token id becomes its row of a table, a vector of hidden_size numbers; no product is computed."
    ),
    "explain_step_embedding_segment": (
        "A lookup in a table with one vector for each sentence: all tokens of a sentence get the same vector."
    ),
    "explain_step_embedding_add": "Token vector and sentence vector are added, element by element.",
    "explain_step_embedding_position": (
        "One trained vector for each absolute position, added to the sum; a shorter sequence takes the first rows."
    ),
    "explain_step_embedding_position_unused": (
        "The table is part of the model, but with relative positions it is not added; the attention uses distances."
    ),
    "explain_step_norm": (
        "Each token's vector is normalised to mean 0 and variance 1, then multiplied by gamma and shifted by beta: the "
        "names in TensorFlow of weight and bias."
    ),
    "explain_step_dropout": (
        "In training each element is set to zero with probability {dropout} (hidden_dropout_prob) and the others are "
        "divided by 1 - {dropout}; in evaluation, and at probability 0, nothing changes. Nothing to learn."
    ),
    "explain_step_attention": (
        "Query, key and value by a dense layer each; softmax of the scores, query times key, weighs the values: "
        "the context, not the scores, goes through a fourth dense layer, which combines the heads."
    ),
    "explain_step_cross_attention": (
        "The same attention with keys and values from the encoder's states instead of its own."
    ),
    "explain_step_add": "The input of the block is added to its output (residual connection).",
    "explain_step_feed_forward": (
        "Two dense layers, and an activation between them that has no parameters, for each token by itself: wider, "
        "then back."
    ),
    "explain_step_pooler": (
        "The first token's vector ([CLS]) through a dense layer and tanh: the whole sequence as one vector."
    ),
    "explain_step_mlm_transform": (
        "A dense layer, the activation and a LayerNorm make each token's vector ready for the vocabulary."
    ),
    "explain_step_mlm_decoder": (
        "A score for every word of the vocabulary; its weight is the token table itself (tied), its bias its own."
    ),
    "explain_step_seq_relationship": "Two scores: the second sentence follows the first, or it does not.",
    "explain_step_classifier": "One dense layer gives the scores of the task.",
    "explain_step_linear": "A dense layer: each vector of in_features numbers becomes one of out_features numbers.",
    "explain_step_conv1d": "A dense layer of transformers: each vector of nx numbers becomes one of nf numbers.",
    "explain_step_lookup": "A lookup: every id becomes its row of a table; no product is computed.",
    "explain_step_normalisation": (
        "The input is normalised, then multiplied by trained numbers and, with a bias, shifted by others."
    ),
    "explain_step_convolution": "A convolution: the same weights for each position, over its neighbours in the kernel.",
    "explain_step_multihead": (
        "Query, key and value by a dense layer each, the two products of attention, and the output layer out_proj."
    ),
    "explain_step_products": (
        "The products of attention: queries with keys give the scores, and their softmax weighs the values."
    ),
    "explain_step_own_products": "Matrix products that the module computes itself.",
    "explain_step_own_sum": "Parameters of the module itself: the sum of the sizes of its tensors.",
    "explain_step_tied": "Tied: {name} is {tied_to}, counted there.",
    "explain_step_unknown": "The sizes of its tensors are not known before the first forward pass.",
    "explain_step_not_called": "The forward pass does not call this module.",
    # titles of sections
    "explain_title_config": "Configuration of a BERT, from {name}",
    "explain_title_inputs": "Inputs of {architecture}.forward: {count}",
    "explain_title_outputs": "Outputs of {architecture}, in the order of the tuple with return_dict=False",
    "explain_title_caches": "Key and value: the four cases of an attention",
    "explain_title_positions": "Relative positions in an attention: position_embedding_type {kind}",
    "explain_title_checkpointing": "Gradient checkpointing",
    # points whose name is no name of the code
    "explain_point_cross_cached": "cross-attention with a cache",
    "explain_point_cross": "cross-attention without a cache",
    "explain_point_self_cached": "self-attention with a cache",
    "explain_point_self": "self-attention without a cache",
    "explain_point_enable": "to turn it on",
    "explain_point_cost": "the cost",
    # fields of the configuration
    "explain_config_vocab_size": "The number of tokens: input_ids are from 0 to {last_id}.",
    "explain_config_hidden_size": (
        "The width of each token's vector in embeddings, encoder and pooler; a multiple of the heads."
    ),
    "explain_config_num_hidden_layers": "The number of layers of the encoder.",
    "explain_config_num_attention_heads": "The number of heads of each attention; the width of a head is {head_size}.",
    "explain_config_intermediate_size": "The width between the two dense layers of the feed-forward.",
    "explain_config_hidden_act": (
        "The activation of the feed-forward and of the head's transform: a name such as gelu (some texts: gleu), "
        "relu, silu, gelu_new, or a function; the pooler has tanh."
    ),
    "explain_config_hidden_dropout_prob": (
        "The drop rate after the embeddings, the attention and the feed-forward; the pooler has no dropout."
    ),
    "explain_config_attention_probs_dropout_prob": "The drop rate of the attention probabilities.",
    "explain_config_max_position_embeddings": (
        "The most tokens of a sequence, often a power of two; a shorter one needs no padding."
    ),
    "explain_config_type_vocab_size": "The number of sentence ids in token_type_ids.",
    "explain_config_initializer_range": (
        "The standard deviation of the initial weights. TensorFlow's code draws from a truncated_normal; "
        "PyTorch's, here and in transformers, from a normal distribution."
    ),
    "explain_config_layer_norm_eps": "The epsilon that each LayerNorm adds to the variance.",
    "explain_config_pad_token_id": "The padding token: its row of the token table starts as zeros.",
    "explain_config_position_embedding_type": (
        "absolute (a table), relative_key (Shaw et al. 2018) or relative_key_query (method 4 of Huang et al. "
        "2020); see the section positions."
    ),
    "explain_config_is_decoder": (
        "True for a decoder: each token attends to those before it. Cross-attention also needs "
        "add_cross_attention=True and encoder_hidden_states."
    ),
    "explain_config_add_cross_attention": "True for a cross-attention in each layer of a decoder.",
    "explain_config_use_cache": (
        "True to return the keys and values of each layer, not attention probabilities; only of a decoder."
    ),
    "explain_config_classifier_dropout": "The drop rate before a classifier; None takes hidden_dropout_prob.",
    "explain_config_pooling": (
        "BertModel(config, add_pooling_layer=True) builds a pooler; here add_pooling_layer={add_pooling_layer}."
    ),
    "explain_config_fields": (
        "In parentheses: the type and the default. 'bertscope schema config' has the other fields and the values "
        "of each."
    ),
    # inputs of a forward pass
    "explain_inputs_input_ids": "The ids of the tokens, integers from 0 to {last_id}. Give these or inputs_embeds.",
    "explain_inputs_attention_mask": (
        "1 for a token to attend to, 0 for padding; [batch, seq, seq] gives each token a separate mask. Default: all "
        "ones."
    ),
    "explain_inputs_token_type_ids": (
        "The sentence of each token, from 0 to {last_type}. Default: all 0, one sentence; the vector added is then row "
        "0 of the table, not a vector of zeros."
    ),
    "explain_inputs_position_ids": "The position of each token, from 0 to {last_position}. Default: 0, 1, 2 ...",
    "explain_inputs_head_mask": (
        "1 to keep a head, 0 to switch it off; [heads] is the same for every layer. Default: every head is kept."
    ),
    "explain_inputs_inputs_embeds": "Vectors in place of the rows of the token table, if input_ids are not given.",
    "explain_inputs_encoder_hidden_states": (
        "The output of an encoder, for the cross-attention of a decoder: only with is_decoder and "
        "add_cross_attention; a decoder without these states runs no cross-attention."
    ),
    "explain_inputs_encoder_attention_mask": (
        "1 for a token of the encoder to attend to, 0 for padding. Default: all ones."
    ),
    "explain_inputs_past_key_values": (
        "The cache of a decoder: key and value of the {past} tokens before; the input then has only the new token."
    ),
    "explain_inputs_use_cache": (
        "True to return the cache. Default: {use_cache}, of the configuration; only a decoder has a cache."
    ),
    "explain_inputs_output_attentions": (
        "True to return the attention probabilities; then the eager kernel runs. Default: {output_attentions}."
    ),
    "explain_inputs_output_hidden_states": "True to return the output of every layer. Default: {output_hidden_states}.",
    "explain_inputs_return_dict": "True for an output with names, False for a tuple. Default: {return_dict}.",
    "explain_inputs_call": (
        "Call the model: model(input_ids) runs torch.nn.Module's __call__, which runs the hooks and forward; "
        "forward does not override it."
    ),
    "explain_inputs_labels": "The targets; with them the output has a loss.",
    "explain_inputs_next_sentence_label": "0 if the second sentence follows the first, 1 if not; needed for the loss.",
    "explain_inputs_start_positions": "The first token of each answer, for the loss.",
    "explain_inputs_end_positions": "The last token of each answer, for the loss.",
    # outputs
    "explain_outputs_loss": "A single number, present only if the labels are given.",
    "explain_outputs_logits": "The scores of the head.",
    "explain_outputs_prediction_logits": "A score for every word of the vocabulary.",
    "explain_outputs_seq_relationship_logits": "Two scores: the second sentence follows the first, or it does not.",
    "explain_outputs_start_logits": "The score of each token as the first of the answer.",
    "explain_outputs_end_logits": "The score of each token as the last of the answer.",
    "explain_outputs_last_hidden_state": "The output of the last layer, a vector for each token.",
    "explain_outputs_pooler_output": (
        "The vector of the first token ([CLS]) in the last layer, after the pooler's dense layer and tanh, which "
        "BERT's pretraining trains by next sentence prediction."
    ),
    "explain_outputs_no_pooler": "None, since this model has no pooler; its place in the tuple stays.",
    "explain_outputs_past_key_values": (
        "With use_cache: the keys and values of each layer, and those of its cross-attention if it has one (with "
        "add_cross_attention; is_encoder_decoder, in some texts, has no effect on a BERT)."
    ),
    "explain_outputs_hidden_states": (
        "With output_hidden_states=True: a tuple of the output of the embeddings and that of each layer, not one "
        "tensor."
    ),
    "explain_outputs_attentions": (
        "With output_attentions=True: a tuple of the probabilities of each layer, after softmax and dropout. The shape "
        "(batch, layers, seq, seq), which some texts give for output[3], is wrong: the layers are the items of the "
        "tuple, and the second dimension is the heads."
    ),
    "explain_outputs_cross_attentions": (
        "With output_attentions=True: the same for the cross-attention, with the encoder's tokens as keys: [batch, "
        "heads, seq, encoder_seq], not seq twice."
    ),
    "explain_outputs_class": "With return_dict=True, the default, they are a {output}.",
    "explain_outputs_order": (
        "An output that was not asked for has no place: without hidden_states, attentions are output[{place}]."
    ),
    "explain_outputs_encoder": (
        "An encoder returns no past_key_values and no cross_attentions; a decoder (is_decoder) has the cache "
        "before hidden_states, and with add_cross_attention cross_attentions [batch, heads, seq, encoder_seq] at "
        "the end."
    ),
    # caches
    "explain_caches_cross_cached": (
        "The cached key and value are used as they are; the encoder's states are not projected again."
    ),
    "explain_caches_cross": (
        "Key and value are computed from encoder_hidden_states, {encoder_states}; encoder_seq is the length of the "
        "encoder's input, here as seq."
    ),
    "explain_caches_self_cached": (
        "Key and value of the 1 new token are appended to those of the {past} cached ones: {past} + 1 = {seq}."
    ),
    "explain_caches_self": "Key and value are computed from hidden_states, {states}; an encoder has only this case.",
    "explain_caches_size": "The cache of all layers: {cache_terms} = {cache_numel:,} numbers, {cache_size} in fp32.",
    "explain_caches_layers": (
        "The cache has num_hidden_layers items (BertConfig has no n_layers); each has two tensors, and two more "
        "with cross-attention, whatever is_encoder_decoder says."
    ),
    "explain_caches_no_cache": (
        "This model is an encoder (is_decoder: false) and returns no cache; as a decoder it would have these shapes."
    ),
    # relative positions
    "explain_positions_absolute": (
        "This model adds absolute positions to the embeddings and has none of the following; the numbers are those of "
        "its sizes with relative_key_query."
    ),
    "explain_positions_sources": (
        "relative_key: Shaw et al. 2018, arXiv:1803.02155; relative_key_query: method 4 of Huang et al. 2020, "
        "arXiv:2009.13658."
    ),
    "explain_positions_distance": (
        "distance[l, r] = l - r + {last_position}, from {least} to {most}: l is the place of the query, r that of the "
        "key."
    ),
    "explain_positions_vectors": (
        "A lookup in distance_embedding: each distance becomes a vector, the same for every head. The table has (2 x "
        "{positions} - 1) x {head_size} = {table:,} parameters in each layer."
    ),
    "explain_positions_of_queries": "Each query [b, h, l, d] times the vectors [l, r, d], summed over d.",
    "explain_positions_of_keys": (
        "Each key [b, h, r, d] times the vectors [l, r, d], summed over d; only relative_key_query has this term."
    ),
    "explain_positions_scores": (
        "{terms}; then divided by the square root of {head_size}, masked, and normalised by softmax."
    ),
    # gradient checkpointing
    "explain_checkpointing_enable": (
        "model.gradient_checkpointing_enable(), or gradient_checkpointing: true in the configuration (here {enabled}). "
        "It applies to a model in train() mode; in eval() mode nothing changes."
    ),
    "explain_checkpointing_forward": (
        "A layer saves only its input and none of its intermediate activations: {saved_terms} x 4 bytes = {saved_size} "
        "in fp32 for all layers."
    ),
    "explain_checkpointing_backward": (
        "From the last layer to the first: the layer runs forward again from its saved input, with the same dropout, "
        "and then backward. The activations of only one layer exist at a time."
    ),
    "explain_checkpointing_cost": (
        "One more forward pass of the layers: {layers} x {layer_flops:,} = {recomputed_flops:,} FLOPs. 'bertscope "
        "estimate {model} --checkpointing none,full' shows both peaks."
    ),
    "explain_checkpointing_no_cache": "A decoder returns no cache while checkpointing is active.",
    # frequent questions
    "explain_question_layer_norm": "What do the {norm:,} parameters of a LayerNorm do?",
    "explain_answer_layer_norm": (
        "gamma and beta hold hidden_size = {hidden:,} numbers each. For input [batch, seq, hidden_size] the mean and "
        "the variance are taken over the last dimension, for each token separately; then element i of each token's "
        "vector is multiplied by gamma[i] and shifted by beta[i]. All tokens share the same gamma and beta."
    ),
    "explain_question_token_type": "Why is token_type_ids all zeros for a single sentence?",
    "explain_answer_token_type": (
        "The id says which sentence a token belongs to: 0 the first, 1 the second. With one sentence every token "
        "belongs to the first, so every token gets row 0 of the table; without token_type_ids, the model assumes this."
    ),
    "explain_question_padding_idx": "What does padding_idx mean?",
    "explain_answer_padding_idx": (
        "Row {padding} of the token table is the padding token: it starts as zeros and receives no gradient from the "
        "lookup. It counts as parameters like every other row. Attention ignores padding only if an attention_mask "
        "says so."
    ),
    "explain_question_totals": "Why do published totals differ?",
    "explain_answer_totals": (
        "This model has {distinct:,} unique parameters; the sum over layers is {layers:,}, where a tied tensor counts "
        "at every layer that uses it. BERT-base is published as 110M (109,482,240 uncased BertModel) and BERT-large as "
        "340M (335,141,888, rounded); base-cased as 108.3M unique parameters (108,340,804) or 130.6M as sum over "
        "layers (130,609,732): the tied decoder, 22,268,928, counted again. Vocabulary, pooler and head differ as well."
    ),
}
