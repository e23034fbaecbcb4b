//! Speed of the attention of a prompt.

use benches::{Row, weights};
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::CubeElement;
use burn_fp4_cubecl::{Capability, Dtype, check_flash_attention, flash_attention};
use burn_fp4_formats::bf16;
use burn_fp4_search::host::AttentionShape;

use crate::figures::Figures;
use crate::{Arguments, median_seconds};

/// Measures the attention of a layer of an 8B decoder, in bf16.
pub(crate) fn measure(client: &Client, arguments: &Arguments, figures: &mut Figures) {
    let device = Capability::of(client);
    let whole = [128, 512, 2048, 8192, 32768].map(|tokens| (tokens, tokens));
    let behind = [16, 128].map(|tokens| (tokens, 32768));
    for (tokens, capacity) in whole.into_iter().chain(behind) {
        let (heads, kv_heads, head_dim) = (32, 8, 128);
        let shape = AttentionShape { batch: 1, tokens, heads, kv_heads, head_dim, capacity };
        let name = format!("flash attention, the last {tokens} of {capacity} tokens");
        let skipped = arguments.filter.as_ref().is_some_and(|part| !name.contains(part));
        if skipped {
            continue;
        }
        if let Err(refusal) = check_flash_attention(&device, &shape, capacity, Dtype::Bf16) {
            eprintln!("{name}: {refusal}");
            continue;
        }
        let upload = |heads: usize, tokens: usize| {
            let values: Vec<_> =
                weights(heads * tokens * head_dim).into_iter().map(bf16::from_f32).collect();
            client.create_from_slice(bf16::as_bytes(&values))
        };
        let (queries, cache) =
            (upload(heads, tokens), [(); 2].map(|()| upload(kv_heads, capacity)));
        let position: Vec<_> =
            (capacity - tokens..capacity).map(|position| position as i32).collect();
        let position = client.create_from_slice(i32::as_bytes(&position));
        let seconds = median_seconds(client, arguments, || {
            let (queries, cache) = (queries.clone(), cache.clone());
            let outputs = flash_attention(
                client,
                &device,
                queries,
                cache,
                position.clone(),
                shape,
                capacity,
                Dtype::Bf16,
            );
            drop(outputs.expect("memory of the shape"));
        });
        let values = tokens * heads * head_dim;
        // Queries, outputs, keys and values; a copy moves as much at 4 TB/s.
        let bytes = 2 * (2 * values + 2 * capacity * kv_heads * head_dim);
        figures.push(Row::new(&name, values, bytes, seconds, bytes as f64 / 4.0e12));
    }
}
