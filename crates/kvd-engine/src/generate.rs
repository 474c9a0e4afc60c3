//! Greedy continuation of a held-out prompt, one token per step.

use crate::attention::LayerAttention;
use crate::model::LanguageModel;
use crate::quality::argmax;
use anyhow::Result;
use std::time::Instant;

/// Tokens a run wrote, and how fast.
#[derive(Clone, Debug, PartialEq)]
pub struct Continuation {
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Rate of the one-token steps; the prompt is not counted.
    pub tokens_per_second: f64,
}

/// Reads `prompt` in steps of `chunk` tokens, then appends the most likely token `new_tokens`
/// times.
///
/// # Errors
/// When the attention fails.
pub async fn generate_tokens<A: LayerAttention>(
    model: &LanguageModel,
    prompt: &[u32],
    new_tokens: usize,
    chunk: usize,
    attention: &mut A,
    mut on_step: impl FnMut(usize),
) -> Result<Continuation> {
    let vocabulary = model.config().vocab_size;
    let most_likely = |logits: &[f32]| {
        let last = logits.len().saturating_sub(vocabulary);
        argmax(&logits[last..]) as u32
    };
    let mut position = 0;
    let mut logits = Vec::new();
    for tokens in prompt.chunks(chunk) {
        logits = model.forward_tokens(tokens, position, attention).await?;
        position += tokens.len();
        on_step(tokens.len());
    }
    let mut tokens = Vec::with_capacity(new_tokens);
    let begin = Instant::now();
    while tokens.len() < new_tokens {
        let next = most_likely(&logits);
        tokens.push(next);
        logits = model.forward_tokens(&[next], position, attention).await?;
        position += 1;
        on_step(1);
    }
    let seconds = begin.elapsed().as_secs_f64();
    Ok(Continuation { tokens, tokens_per_second: new_tokens as f64 / seconds })
}
