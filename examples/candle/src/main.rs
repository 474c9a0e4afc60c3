//! Greedy text of a Llama whose older tokens kvd holds: token ids in, token ids out.

mod cache;
mod llama;

use anyhow::{Context, Result, ensure};
use cache::KvdCache;
use candle_core::{D, Tensor};
use kvd_client::Client;
use llama::LlamaModel;
use std::path::Path;

const USAGE: &str = "kvd-candle MODEL_FOLDER ENDPOINT CODEC NEW_TOKENS CHUNK < token_ids.json";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let [folder, endpoint, codec, new_tokens, chunk] = &given[..] else {
        anyhow::bail!("usage: {USAGE}");
    };
    let prompt: Vec<u32> = serde_json::from_reader(std::io::stdin()).context("token ids")?;
    ensure!(!prompt.is_empty(), "no tokens to go on from");
    let model = LlamaModel::load_model(Path::new(folder))?;
    let client = Client::connect(endpoint.parse()?).await?;
    let mut cache = KvdCache::open_cache(&client, model.model_config(), codec).await?;
    let written =
        generate_tokens(&model, &mut cache, &prompt, new_tokens.parse()?, chunk.parse()?).await?;
    cache.close_cache().await?;
    println!("{}", serde_json::to_string(&written)?);
    Ok(())
}

/// Reads `prompt` in steps of `chunk` tokens, then appends the likeliest token again and again.
async fn generate_tokens(
    model: &LlamaModel,
    cache: &mut KvdCache,
    prompt: &[u32],
    new_tokens: usize,
    chunk: usize,
) -> Result<Vec<u32>> {
    ensure!(chunk > 0, "steps of no tokens");
    let mut next = 0;
    for tokens in prompt.chunks(chunk) {
        next = likeliest_token(&model.forward_tokens(tokens, cache).await?)?;
    }
    let mut written = Vec::new();
    while written.len() < new_tokens {
        written.push(next);
        next = likeliest_token(&model.forward_tokens(&[next], cache).await?)?;
    }
    Ok(written)
}

fn likeliest_token(logits: &Tensor) -> Result<u32> {
    Ok(logits.argmax(D::Minus1)?.to_scalar()?)
}
