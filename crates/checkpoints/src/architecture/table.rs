//! A row for each architecture of Hugging Face models, and the names that all of them have in
//! common.
//!
//! Names are as in the files that `save_pretrained` writes. Each row was compared with the
//! classes of transformers by `tests/interop/architectures.py`, which makes a small model of every
//! `model_type` here.

/// The way in which transformers 5 loads FP4 weights of compressed-tensors into an architecture, as
/// `tests/interop/architectures.py` has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransformersLoad {
    /// `from_pretrained(folder)`.
    Packed,
    /// Its code uses the weights of layers, which have to be decoded:
    /// `quantization_config=CompressedTensorsConfig(run_compressed=False)`.
    Decoded,
    /// It stacks the experts in one tensor, and finds no weights for it.
    Never,
}

/// The facts of an architecture.
#[derive(Debug)]
pub(crate) struct Row {
    /// The values of `model_type` in `config.json`.
    pub(super) types: &'static [&'static str],
    /// Ends of the names of linear layers, whose weights are `[outputs, inputs]`, or
    /// `[experts, outputs, inputs]`. Empty in [`ANY`], where every matrix that is not kept is one.
    pub(super) linear: &'static [&'static str],
    /// The same for weights `[inputs, outputs]`, or `[experts, inputs, outputs]`.
    pub(super) transposed: &'static [&'static str],
    /// Name ends of [`transposed`](Self::transposed) weights that some files have as
    /// `[experts, outputs, inputs]`, each with the field of `config.json` that counts the inputs.
    pub(super) inputs: &'static [(&'static str, &'static str)],
    /// Globs of modules that stay, each with a description, tried before [`KEPT`].
    pub(super) kept: &'static [(&'static str, &'static str)],
    /// Globs of modules that belong to another modality than the model.
    pub(super) modalities: &'static [&'static str],
    /// Names of output layers that have no tensor in a file if they are tied to an embedding.
    pub(super) tied: &'static [&'static str],
    /// Beginnings of the names of modules in files, each with that in transformers, where they
    /// differ.
    pub(super) renamed: &'static [(&'static str, &'static str)],
    /// Globs of modules in feed-forward networks, where the names of a preset do not tell them.
    pub(super) feed_forward: &'static [&'static str],
    /// Lists of name ends of layers that have one input if they have one parent. The first list
    /// with a layer's name counts; a list of one name is for a layer without a family.
    pub(super) families: &'static [&'static [&'static str]],
    pub(super) transformers: TransformersLoad,
}

/// Modules of every architecture that stay, by glob, each with a description.
///
/// These are the layers that ModelOpt never quantizes (`default_disabled_quantizers`), the heads
/// and embeddings of transformers, and the same in the names of GGUF files.
pub(super) const KEPT: [(&str, &str); 47] = [
    ("*lm_head*", "the output layer"),
    ("*output_layer*", "the output layer"),
    ("output", "the output layer"),
    ("*proj_out*", "the output layer"),
    ("*embed_out", "the output layer"),
    ("*cls.predictions.decoder", "the output layer"),
    ("*cls.seq_relationship", "the output layer"),
    ("*vocab_projector", "the output layer"),
    ("*qa_outputs", "the output layer"),
    ("classifier", "the output layer"),
    ("*.classifier", "the output layer"),
    ("*classifier.out_proj", "the output layer"),
    ("score", "the output layer"),
    ("*.score", "the output layer"),
    ("head", "the output layer"),
    ("*.head", "the output layer"),
    ("*_head", "the output layer"),
    ("*classification_head*", "the output layer"),
    ("*logits", "the output layer"),
    ("*embed*", EMBEDDING),
    ("*wte", EMBEDDING),
    ("*wpe", EMBEDDING),
    ("shared", EMBEDDING),
    ("*.shared", EMBEDDING),
    ("*relative_attention_bias", EMBEDDING),
    ("*token_embd*", EMBEDDING),
    ("*position_embd*", EMBEDDING),
    ("*token_types*", EMBEDDING),
    ("*norm", "a normalization"),
    ("*norm?", "a normalization"),
    ("*router*", "a router"),
    ("*mlp.gate", "a router"),
    ("*mlp.gate.*", "a router"),
    ("*moe.gate", "a router"),
    ("*feed_forward.gate", "a router"),
    ("*ffn.gate", "a router"),
    ("*shared_expert_gate*", "a router"),
    ("*ffn_gate_inp*", "a router"),
    ("*conv1d*", CONVOLUTION),
    ("*in_proj_a", STATE),
    ("*in_proj_b", STATE),
    ("*ssm_a", STATE),
    ("mtp.*", "a layer that predicts further tokens"),
    ("*.mtp.*", "a layer that predicts further tokens"),
    ("*nextn*", "a layer that predicts further tokens"),
    ("*multi_modal_projector*", MODALITY),
    ("mm.*", MODALITY),
];

/// Description of an embedding.
pub(crate) const EMBEDDING: &str = "an embedding";
/// Description of a convolution.
pub(crate) const CONVOLUTION: &str = "a convolution";
/// Description of a projection that parametrizes a state-space recurrence.
const STATE: &str = "a state's projection";
/// Description of a part for images or sound in a model of text.
pub(super) const MODALITY: &str = "part of another modality";

/// Ends of the names of linear layers of architectures that are not in the table, where the class
/// of a layer matters.
pub(super) const LINEAR: [&str; 7] = ["_proj", "lm_head", "fc1", "fc2", "w1", "w2", "w3"];

const MODALITIES: &[&str] = &["*visual*", "*vision*", "*audio*"];

const QKV: &[&str] = &["q_proj", "k_proj", "v_proj"];
const GATE_UP: &[&str] = &["gate_proj", "up_proj"];
/// Keys and values of a cross attention, whose input is the encoder's output.
const CROSS: [&[&str]; 4] = [
    &["encoder_attn.q_proj"],
    &["encoder_attn.k_proj", "encoder_attn.v_proj"],
    &["cross_attn.q_proj"],
    &["cross_attn.k_proj", "cross_attn.v_proj"],
];

/// Names that are tried where the architecture is not known, and in GGUF files, whose names are
/// the same for all architectures.
pub(super) const ANY: Row = Row {
    types: &[],
    linear: &[],
    transposed: &[],
    inputs: &[],
    kept: &[],
    modalities: MODALITIES,
    tied: &["lm_head"],
    renamed: &[],
    feed_forward: &[],
    families: &[
        CROSS[0],
        CROSS[1],
        CROSS[2],
        CROSS[3],
        QKV,
        &["attn_q", "attn_k", "attn_v"],
        GATE_UP,
        &["w1", "w3"],
        &["ffn_gate", "ffn_up"],
        &["ffn_gate_exps", "ffn_up_exps"],
        &["q_a_proj", "kv_a_proj_with_mqa"],
    ],
    transformers: TransformersLoad::Packed,
};

const LLAMA: Row = Row {
    types: &[
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "olmo2",
        "smollm3",
    ],
    linear: &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    families: &[QKV, GATE_UP],
    ..ANY
};

const GPT_NEOX: Row = Row {
    types: &["gpt_neox"],
    linear: &["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    tied: &["embed_out"],
    renamed: &[("embed_out", "lm_head")],
    families: &[],
    ..ANY
};

const OPT: Row = Row {
    types: &["opt"],
    linear: &["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "project_in", "project_out"],
    feed_forward: &["*.fc[12]"],
    families: &[CROSS[0], CROSS[1], QKV],
    ..ANY
};

const BERT: Row = Row {
    types: &["bert"],
    linear: &["query", "key", "value", "dense"],
    tied: &["cls.predictions.decoder"],
    // Not `attention.output.dense`.
    feed_forward: &["*.layer.*.intermediate.dense", "*[0-9].output.dense"],
    families: &[
        &["crossattention.self.query"],
        &["crossattention.self.key", "crossattention.self.value"],
        &["query", "key", "value"],
    ],
    ..ANY
};

/// The architectures.
pub(super) const ROWS: [Row; 20] = [
    LLAMA,
    Row {
        types: &["gemma3"],
        renamed: &[
            ("language_model.model.", "model.language_model."),
            ("vision_tower.", "model.vision_tower."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ],
        ..LLAMA
    },
    Row {
        types: &["phi3"],
        linear: &["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        families: &[],
        ..ANY
    },
    // Experts one by one, or stacked if they were saved as transformers 5 holds them.
    Row {
        types: &["mixtral", "qwen2_moe", "qwen3_moe"],
        linear: &[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "w1",
            "w2",
            "w3",
            "experts.gate_up_proj",
        ],
        families: &[QKV, GATE_UP, &["w1", "w3"]],
        transformers: TransformersLoad::Never,
        ..ANY
    },
    Row {
        types: &["deepseek_v2", "deepseek_v3"],
        linear: &[
            "q_proj",
            "q_a_proj",
            "q_b_proj",
            "kv_a_proj_with_mqa",
            "kv_b_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "experts.gate_up_proj",
        ],
        families: &[&["q_a_proj", "kv_a_proj_with_mqa"], GATE_UP],
        transformers: TransformersLoad::Never,
        ..ANY
    },
    Row {
        types: &["gpt_oss", "llama4", "llama4_text"],
        linear: &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        transposed: &["experts.gate_up_proj", "experts.down_proj"],
        families: &[QKV, GATE_UP],
        ..ANY
    },
    // Published files have experts as `[inputs, outputs]`, those that transformers 5 saves as
    // `[outputs, inputs]`.
    Row {
        types: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
        linear: &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        transposed: &["experts.gate_up_proj", "experts.down_proj"],
        inputs: &[
            ("experts.gate_up_proj", "hidden_size"),
            ("experts.down_proj", "moe_intermediate_size"),
        ],
        families: &[QKV, GATE_UP],
        ..ANY
    },
    // `Conv1D` of transformers.
    Row {
        types: &["gpt2", "openai-gpt", "imagegpt"],
        transposed: &["c_attn", "q_attn", "c_proj", "c_fc"],
        families: &[],
        ..ANY
    },
    GPT_NEOX,
    Row { types: &["bloom"], tied: ANY.tied, renamed: ANY.renamed, ..GPT_NEOX },
    Row {
        types: &["falcon"],
        tied: ANY.tied,
        renamed: ANY.renamed,
        transformers: TransformersLoad::Decoded,
        ..GPT_NEOX
    },
    OPT,
    Row { types: &["whisper"], tied: &["proj_out"], ..OPT },
    // Both of its modalities are the model.
    Row {
        types: &["clip"],
        linear: &[
            "q_proj",
            "k_proj",
            "v_proj",
            "out_proj",
            "fc1",
            "fc2",
            "text_projection",
            "visual_projection",
        ],
        modalities: &[],
        tied: &[],
        families: &[QKV],
        ..ANY
    },
    BERT,
    Row { types: &["roberta", "xlm-roberta"], tied: &["lm_head.decoder"], ..BERT },
    Row { types: &["vit"], tied: &[], ..BERT },
    Row {
        types: &["distilbert"],
        linear: &[
            "q_lin",
            "k_lin",
            "v_lin",
            "out_lin",
            "lin1",
            "lin2",
            "vocab_transform",
            "pre_classifier",
        ],
        tied: &["vocab_projector"],
        families: &[&["q_lin", "k_lin", "v_lin"]],
        ..ANY
    },
    Row {
        types: &["t5", "mt5", "umt5"],
        linear: &[
            "SelfAttention.q",
            "SelfAttention.k",
            "SelfAttention.v",
            "SelfAttention.o",
            "EncDecAttention.q",
            "EncDecAttention.k",
            "EncDecAttention.v",
            "EncDecAttention.o",
            "wi",
            "wi_0",
            "wi_1",
            "wo",
        ],
        feed_forward: &["*.DenseReluDense.*"],
        families: &[
            &["SelfAttention.q", "SelfAttention.k", "SelfAttention.v"],
            &["EncDecAttention.k", "EncDecAttention.v"],
            &["wi_0", "wi_1"],
        ],
        transformers: TransformersLoad::Decoded,
        ..ANY
    },
    // The scan takes the weights of the step, not the outputs of layers.
    Row {
        types: &["mamba", "falcon_mamba", "mamba2"],
        linear: &["in_proj", "out_proj"],
        kept: &[("*x_proj", STATE), ("*dt_proj", STATE)],
        families: &[],
        transformers: TransformersLoad::Decoded,
        ..ANY
    },
];
