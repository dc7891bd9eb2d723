"""The sentences of the sections of `explain`, in English and in Chinese, by the key of the section or point."""

TITLES: dict[str, tuple[str, str]] = {
    "inputs": ("Inputs of {architecture}.forward: {count}", "{architecture}.forward 的 {count} 个输入"),
    "outputs": (
        "Outputs of {architecture}, in the order of the tuple with return_dict=False",
        "{architecture} 的输出，按 return_dict=False 时元组的顺序",
    ),
    "caches": ("Key and value: the four cases of an attention", "key 和 value 的来源：注意力的四种情况"),
    "positions": (
        "Relative positions in an attention: position_embedding_type {kind}",
        "注意力中的相对位置：position_embedding_type {kind}",
    ),
    "checkpointing": ("Gradient checkpointing", "梯度检查点"),
}

NAMES: dict[str, tuple[str, str]] = {  # of points whose name is no name of the code
    "cross_cached": ("cross-attention with a cache", "交叉注意力，有缓存"),
    "cross": ("cross-attention without a cache", "交叉注意力，无缓存"),
    "self_cached": ("self-attention with a cache", "自注意力，有缓存"),
    "self": ("self-attention without a cache", "自注意力，无缓存"),
    "enable": ("to turn it on", "开启"),
    "cost": ("the cost", "代价"),
}

INPUTS: dict[str, tuple[str, str]] = {
    "input_ids": (
        "The ids of the tokens, integers from 0 to {last_id}. Give these or inputs_embeds.",
        "token 编号，取值为 0 到 {last_id} 的整数。与 inputs_embeds 二选一。",
    ),
    "attention_mask": (
        "1 for a token to attend to, 0 for padding; [batch, seq, seq] gives each token a separate mask. "
        "Default: all ones.",
        "1 表示参与注意力，0 表示填充；也可为 [batch, seq, seq]，即每个 token 各有掩码。默认全为 1。",
    ),
    "token_type_ids": (
        "The sentence of each token, from 0 to {last_type}. Default: all 0, one sentence; the vector added is then row 0 "
        "of the table, not a vector of zeros.",
        "每个 token 属于第几句，取值 0 到 {last_type}。默认全为 0，即只有一句；此时加上的是表的第 0 行，而不是零向量。",
    ),
    "position_ids": (
        "The position of each token, from 0 to {last_position}. Default: 0, 1, 2 ...",
        "每个 token 的位置，取值 0 到 {last_position}。默认为 0, 1, 2 ……",
    ),
    "head_mask": (
        "1 to keep a head, 0 to switch it off; [heads] is the same for every layer. Default: every head is kept.",
        "1 表示保留该注意力头，0 表示关闭；[heads] 对每层相同。默认全部保留。",
    ),
    "inputs_embeds": (
        "Vectors in place of the rows of the token table, if input_ids are not given.",
        "不传 input_ids 时，直接给出向量，代替词嵌入表中的行。",
    ),
    "encoder_hidden_states": (
        "The output of an encoder, for the cross-attention of a decoder (is_decoder and add_cross_attention).",
        "编码器的输出，供解码器的交叉注意力使用（is_decoder 且 add_cross_attention）。",
    ),
    "encoder_attention_mask": (
        "1 for a token of the encoder to attend to, 0 for padding. Default: all ones.",
        "1 表示编码器的该 token 参与注意力，0 表示填充。默认全为 1。",
    ),
    "past_key_values": (
        "The cache of a decoder: key and value of the {past} tokens before; the input then has only the new token.",
        "解码器的缓存：之前 {past} 个 token 的 key 和 value；此时输入只含新的 token。",
    ),
    "use_cache": (
        "True to return the cache. Default: {use_cache}, of the configuration; only a decoder has a cache.",
        "是否返回缓存。默认取配置中的 {use_cache}；只有解码器有缓存。",
    ),
    "output_attentions": (
        "True to return the attention probabilities; then the eager kernel runs. Default: {output_attentions}.",
        "是否返回注意力概率；返回时使用 eager 实现。默认 {output_attentions}。",
    ),
    "output_hidden_states": (
        "True to return the output of every layer. Default: {output_hidden_states}.",
        "是否返回每一层的输出。默认 {output_hidden_states}。",
    ),
    "return_dict": (
        "True for an output with names, False for a tuple. Default: {return_dict}.",
        "True 返回带名称的输出，False 返回元组。默认 {return_dict}。",
    ),
    "labels": ("The targets; with them the output has a loss.", "目标；传入后输出包含 loss。"),
    "next_sentence_label": (
        "0 if the second sentence follows the first, 1 if not; needed for the loss.",
        "0 表示第二句接在第一句之后，1 表示不是；计算 loss 时需要。",
    ),
    "start_positions": ("The first token of each answer, for the loss.", "答案的第一个 token，用于计算 loss。"),
    "end_positions": ("The last token of each answer, for the loss.", "答案的最后一个 token，用于计算 loss。"),
}

OUTPUTS: dict[str, tuple[str, str]] = {
    "loss": ("A single number, present only if the labels are given.", "标量，只有传入标签时才有。"),
    "logits": ("The scores of the head.", "任务头的分数。"),
    "prediction_logits": ("A score for every word of the vocabulary.", "词表中每个词的分数。"),
    "seq_relationship_logits": (
        "Two scores: the second sentence follows the first, or it does not.",
        "两个分数：第二句是否接在第一句之后。",
    ),
    "start_logits": ("The score of each token as the first of the answer.", "每个 token 作为答案开头的分数。"),
    "end_logits": ("The score of each token as the last of the answer.", "每个 token 作为答案结尾的分数。"),
    "last_hidden_state": (
        "The output of the last layer, a vector for each token.",
        "最后一层的输出，每个 token 一个向量。",
    ),
    "pooler_output": (
        "The vector of the first token ([CLS]) in the last layer, after the pooler's dense layer and tanh.",
        "最后一层中第一个 token（[CLS]）的向量，经池化层的全连接层和 tanh。",
    ),
    "no_pooler": (
        "None, since this model has no pooler; its place in the tuple stays.",
        "本模型没有池化层，值为 None，但在元组中仍占位置。",
    ),
    "past_key_values": (
        "With use_cache: key and value of each layer, and those of its cross-attention if it has one.",
        "use_cache 时返回：每层的 key 和 value；有交叉注意力时还有它的 key 和 value。",
    ),
    "hidden_states": (
        "With output_hidden_states=True: a tuple of the output of the embeddings and that of each layer.",
        "output_hidden_states=True 时返回：由嵌入层的输出和各层的输出组成的元组。",
    ),
    "attentions": (
        "With output_attentions=True: a tuple of the probabilities of each layer, after softmax and dropout. The shape "
        "(batch, layers, seq, seq), which some texts give for output[3], is wrong: the layers are the items of the tuple, "
        "and the second dimension is the heads.",
        "output_attentions=True 时返回：由各层 softmax 和 dropout 之后的概率组成的元组。有的资料把 output[3] 的形状写成 "
        "(batch, layers, seq, seq)，这是错的：层是元组的元素，第二维是注意力头。",
    ),
    "cross_attentions": (
        "With output_attentions=True: the same for the cross-attention, with the encoder's tokens as keys.",
        "output_attentions=True 时返回：交叉注意力的概率，key 为编码器的 token。",
    ),
    "order": (
        "An output that was not asked for has no place: without hidden_states, attentions are output[{place}].",
        "未要求返回的输出不占位置：不返回 hidden_states 时，attentions 是 output[{place}]。",
    ),
    "encoder": (
        "An encoder returns no past_key_values and no cross_attentions; a decoder (is_decoder) has the cache before "
        "hidden_states and cross_attentions at the end.",
        "编码器不返回 past_key_values 和 cross_attentions；解码器（is_decoder）的缓存排在 hidden_states 之前，"
        "cross_attentions 排在最后。",
    ),
}

CACHES: dict[str, tuple[str, str]] = {
    "cross_cached": (
        "The cached key and value are used as they are; the encoder's states are not projected again.",
        "直接使用缓存的 key 和 value，不再对编码器的输出做投影。",
    ),
    "cross": (
        "Key and value are computed from encoder_hidden_states, {encoder_states}; encoder_seq is the length of the "
        "encoder's input, here as seq.",
        "key 和 value 由 encoder_hidden_states 计算，形状 {encoder_states}；encoder_seq 为编码器输入的长度，此处与 seq 相同。",
    ),
    "self_cached": (
        "Key and value of the 1 new token are appended to those of the {past} cached ones: {past} + 1 = {seq}.",
        "把 1 个新 token 的 key 和 value 接在缓存的 {past} 个之后：{past} + 1 = {seq}。",
    ),
    "self": (
        "Key and value are computed from hidden_states, {states}; an encoder has only this case.",
        "key 和 value 由 hidden_states 计算，形状 {states}；编码器只有这一种情况。",
    ),
    "size": (
        "The cache of all layers: {cache_terms} = {cache_numel:,} numbers, {cache_size} in fp32.",
        "全部层的缓存：{cache_terms} = {cache_numel:,} 个数，fp32 下为 {cache_size}。",
    ),
    "no_cache": (
        "This model is an encoder (is_decoder: false) and returns no cache; as a decoder it would have these shapes.",
        "本模型是编码器（is_decoder: false），不返回缓存；下列形状是它作为解码器时的。",
    ),
}

POSITIONS: dict[str, tuple[str, str]] = {
    "absolute": (
        "This model adds absolute positions to the embeddings and has none of the following; the numbers are those of "
        "its sizes with relative_key_query.",
        "本模型在嵌入层加绝对位置，没有以下步骤；数字为同样大小的模型使用 relative_key_query 时的值。",
    ),
    "distance": (
        "distance[l, r] = l - r + {last_position}, from {least} to {most}: l is the place of the query, r that of the key.",
        "distance[l, r] = l - r + {last_position}，取值 {least} 到 {most}：l 为 query 的位置，r 为 key 的位置。",
    ),
    "vectors": (
        "A lookup in distance_embedding: each distance becomes a vector, the same for every head. The table has "
        "(2 x {positions} - 1) x {head_size} = {table:,} parameters in each layer.",
        "查表 distance_embedding：每个距离得到一个向量，各头相同。每层的表有 (2 x {positions} - 1) x {head_size} = {table:,} 个参数。",
    ),
    "of_queries": (
        "Each query [b, h, l, d] times the vectors [l, r, d], summed over d.",
        "query [b, h, l, d] 与向量 [l, r, d] 在 d 上点积。",
    ),
    "of_keys": (
        "Each key [b, h, r, d] times the vectors [l, r, d], summed over d; only relative_key_query has this term.",
        "key [b, h, r, d] 与向量 [l, r, d] 在 d 上点积；只有 relative_key_query 有这一项。",
    ),
    "scores": (
        "{terms}; then divided by the square root of {head_size}, masked, and normalised by softmax.",
        "{terms}；再除以 {head_size} 的平方根，加掩码，做 softmax。",
    ),
}

CHECKPOINTING: dict[str, tuple[str, str]] = {
    "enable": (
        "model.gradient_checkpointing_enable(), or gradient_checkpointing: true in the configuration (here {enabled}). It "
        "applies to a model in train() mode; in eval() mode nothing changes.",
        "调用 model.gradient_checkpointing_enable()，或在配置中设 gradient_checkpointing: true（此处为 {enabled}）。"
        "只在 train() 模式下起作用，eval() 模式下没有变化。",
    ),
    "forward": (
        "A layer saves only its input and none of its intermediate activations: {saved_terms} x 4 bytes = {saved_size} in "
        "fp32 for all layers.",
        "每层只保存自己的输入，不保存中间的激活值：全部层在 fp32 下为 {saved_terms} x 4 字节 = {saved_size}。",
    ),
    "backward": (
        "From the last layer to the first: the layer runs forward again from its saved input, with the same dropout, and "
        "then backward. The activations of only one layer exist at a time.",
        "从最后一层到第一层：用保存的输入重新做一次该层的前向（dropout 相同），再做反向。同一时刻只有一层的激活值。",
    ),
    "cost": (
        "One more forward pass of the layers: {layers} x {layer_flops:,} = {recomputed_flops:,} FLOPs. 'bertscope estimate "
        "{model} --checkpointing none,full' shows both peaks.",
        "多做一次各层的前向：{layers} x {layer_flops:,} = {recomputed_flops:,} FLOPs。"
        "'bertscope estimate {model} --checkpointing none,full' 给出两种峰值。",
    ),
    "no_cache": (
        "A decoder returns no cache while checkpointing is active.",
        "启用梯度检查点时，解码器不返回缓存。",
    ),
}
