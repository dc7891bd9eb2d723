"""The sentences of `explain`, in English and in Chinese, by the key of their step or question."""

LANGUAGES = ("en", "zh")

SENTENCES: dict[str, tuple[str, str]] = {
    "input_token": (
        "The ids of the tokens go in, such as 101, 2312, 4324, 743, 664.",
        "传入 token 的编号，例如 101, 2312, 4324, 743, 664。",
    ),
    "input_segment": (
        "The ids of the sentences go in, such as 0, 0, 0, 1, 1: first and second sentence; all zeros for one sentence.",
        "传入句子编号，例如 0, 0, 0, 1, 1，用来区分第一句和第二句；只有一句话时全部为 0。",
    ),
    "embedding_token": (
        "A lookup: every token id becomes its row of a table, a vector of hidden_size numbers; no product is computed.",
        "查表：每个 token 编号取出词嵌入表中的一行，得到 hidden_size 维向量，不做矩阵乘法。",
    ),
    "embedding_segment": (
        "A lookup in a table with one vector for each sentence: all tokens of a sentence get the same vector.",
        "查表：每个句子对应一个向量，同一句的所有 token 得到相同的向量。",
    ),
    "embedding_add": (
        "Token vector and sentence vector are added, element by element.",
        "token 向量与句子向量逐元素相加。",
    ),
    "embedding_position": (
        "One trained vector for each absolute position, added to the sum.",
        "每个绝对位置有一个可训练的向量，加到上面的和里。",
    ),
    "embedding_position_unused": (
        "The table is part of the model, but with relative positions it is not added; the attention uses distances.",
        "该表仍属于模型，但使用相对位置编码时不参与相加，由注意力层使用相对距离。",
    ),
    "norm": (
        "Each token's vector is normalised to mean 0 and variance 1, then multiplied by gamma and shifted by beta: the "
        "names in TensorFlow of weight and bias.",
        "对每个 token 的向量单独归一化为均值 0、方差 1，再逐元素乘 gamma、加 beta（TensorFlow 的名称，即 PyTorch 的 weight 和 bias）。",
    ),
    "dropout": (
        "In training each element is set to zero with probability {dropout} (hidden_dropout_prob) and the others are "
        "divided by 1 - {dropout}; in evaluation, and at probability 0, nothing changes. Nothing to learn.",
        "训练时每个元素以概率 {dropout}（hidden_dropout_prob）置零，其余除以 1 - {dropout}；评估时或概率为 0 时不起作用。没有可学习的参数。",
    ),
    "attention": (
        "Query, key and value by a dense layer each; softmax of query times key weighs the values; a fourth dense "
        "layer combines the heads.",
        "Q、K、V 各经过一个全连接层；Q 与 K 点积后经 softmax 得到权重，对 V 加权求和；再经第四个全连接层合并各头。",
    ),
    "cross_attention": (
        "The same attention with keys and values from the encoder's states instead of its own.",
        "与自注意力相同，但 K、V 来自编码器的输出。",
    ),
    "add": (
        "The input of the block is added to its output (residual connection).",
        "把该模块的输入加到输出上（残差连接）。",
    ),
    "feed_forward": (
        "Two dense layers with an activation between them, for each token by itself: wider, then back.",
        "对每个 token 独立进行的两个全连接层，中间有激活函数：先升维，再降回。",
    ),
    "pooler": (
        "The first token's vector ([CLS]) through a dense layer and tanh: the whole sequence as one vector.",
        "取第一个 token（[CLS]）的向量，经全连接层和 tanh，作为整句的表示。",
    ),
    "mlm_transform": (
        "A dense layer, the activation and a LayerNorm make each token's vector ready for the vocabulary.",
        "全连接层、激活函数和 LayerNorm，为投影到词表做准备。",
    ),
    "mlm_decoder": (
        "A score for every word of the vocabulary; its weight is the token table itself (tied), its bias its own.",
        "对词表中每个词打分；权重与词嵌入表共享，偏置独立。",
    ),
    "seq_relationship": (
        "Two scores: the second sentence follows the first, or it does not.",
        "两个分数：第二句是否接在第一句之后。",
    ),
    "classifier": ("One dense layer gives the scores of the task.", "一个全连接层给出任务的分数。"),
    # modules of any model
    "linear": (
        "A dense layer: each vector of in_features numbers becomes one of out_features numbers.",
        "全连接层：把每个 in_features 维向量变为 out_features 维向量。",
    ),
    "conv1d": (
        "A dense layer of transformers: each vector of nx numbers becomes one of nf numbers.",
        "transformers 的全连接层：把每个 nx 维向量变为 nf 维向量。",
    ),
    "lookup": (
        "A lookup: every id becomes its row of a table; no product is computed.",
        "查表：每个编号取出表中的一行，不做矩阵乘法。",
    ),
    "normalisation": (
        "The input is normalised, then multiplied by trained numbers and, with a bias, shifted by others.",
        "归一化后逐元素乘可训练的系数；若有偏置，再加上偏置。",
    ),
    "convolution": (
        "A convolution: the same weights for each position, over its neighbours in the kernel.",
        "卷积：各位置使用相同的权重，对卷积核覆盖的相邻位置求和。",
    ),
    "multihead": (
        "Query, key and value by a dense layer each, the two products of attention, and the output layer out_proj.",
        "Q、K、V 各经过一个全连接层，再做注意力的两次矩阵乘法，最后是输出层 out_proj。",
    ),
    "products": (
        "The products of attention: queries with keys give the scores, and their softmax weighs the values.",
        "注意力的矩阵乘法：Q 与 K 的点积得到分数，经 softmax 后对 V 加权求和。",
    ),
    "own_products": (
        "Matrix products that the module computes itself.",
        "该模块自身的矩阵乘法。",
    ),
    "own_sum": (
        "Parameters of the module itself: the sum of the sizes of its tensors.",
        "该模块自身的参数：各张量大小之和。",
    ),
    "tied": (
        "Tied: {name} is {tied_to}, counted there.",
        "共享：{name} 即 {tied_to}，只在该处计数。",
    ),
    "unknown": (
        "The sizes of its tensors are not known before the first forward pass.",
        "首次前向计算之前，张量的大小未知。",
    ),
    "not_called": (
        "The forward pass does not call this module.",
        "前向计算没有调用该模块。",
    ),
}

QUESTIONS: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "layer_norm": (
        (
            "What do the {norm:,} parameters of a LayerNorm do?",
            "gamma and beta hold hidden_size = {hidden:,} numbers each. For input [batch, seq, hidden_size] the mean and "
            "the variance are taken over the last dimension, for each token separately; then element i of each token's "
            "vector is multiplied by gamma[i] and shifted by beta[i]. All tokens share the same gamma and beta.",
        ),
        (
            "LayerNorm 的 {norm:,} 个参数有什么作用？",
            "gamma 和 beta 各有 hidden_size = {hidden:,} 个数。输入为 [batch, seq, hidden_size] 时，对每个 token 在最后"
            "一维上求均值和方差；归一化后，第 i 个元素乘 gamma[i] 再加 beta[i]。所有 token 共用同一组 gamma 和 beta。",
        ),
    ),
    "token_type": (
        (
            "Why is token_type_ids all zeros for a single sentence?",
            "The id says which sentence a token belongs to: 0 the first, 1 the second. With one sentence every token "
            "belongs to the first, so every token gets row 0 of the table; without token_type_ids, the model assumes this.",
        ),
        (
            "为什么单句输入的 token_type_ids 全为 0？",
            "该编号表示 token 属于哪一句：0 为第一句，1 为第二句。只有一句时，所有 token 都属于第一句，都取表的第 0 行；不传入时模型默认如此。",
        ),
    ),
    "padding_idx": (
        (
            "What does padding_idx mean?",
            "Row {padding} of the token table is the padding token: it starts as zeros and receives no "
            "gradient from the lookup. It counts as parameters like every other row. Attention ignores padding only if "
            "an attention_mask says so.",
        ),
        (
            "padding_idx 是什么意思？",
            "词嵌入表的第 {padding} 行对应填充 token：初始化为零向量，查表不为它产生梯度，但仍计入参数量。是否忽略填充位置由 attention_mask 决定。",
        ),
    ),
    "totals": (
        (
            "Why do published totals differ?",
            "This model has {distinct:,} unique parameters; the sum over layers is {layers:,}, where a tied tensor counts at "
            "every layer that uses it. BERT-base is published as 110M (109,482,240 uncased BertModel) and BERT-large "
            "as 340M (335,141,888, rounded); base-cased as 108.3M unique parameters (108,340,804) or 130.6M as sum over layers "
            "(130,609,732): the tied decoder, 22,268,928, counted again. Vocabulary, pooler and head differ as well.",
        ),
        (
            "为什么公布的参数总量不一致？",
            "本模型去重后有 {distinct:,} 个参数，按层累加为 {layers:,}（共享张量在每个使用它的层都计一次）。BERT-base 通常称 110M"
            "（uncased BertModel 为 109,482,240），BERT-large 称 340M（实为 335,141,888）；base-cased 去重为 108.3M（108,340,804），"
            "按层累加为 130.6M（130,609,732），差别在于共享的解码器权重 22,268,928 又计了一次。词表、池化层和任务头不同也会影响总量。",
        ),
    ),
}
