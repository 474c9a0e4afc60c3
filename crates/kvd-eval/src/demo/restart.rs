//! A prompt that outlives its daemon: published by one, found on disk by the next.
//!
//! Who runs this starts and kills the daemons. The text goes on from the same pages both times:
//! those before the prompt's last page come from the cache, the rest is computed.

use super::options::DemoOptions;
use super::subject::DemoSubject;
use crate::measure::KvdAttention;
use anyhow::{Context, Result, ensure};
use kvd_client::{BlockKeys, Client, Endpoint, ModelId, ModelIdentity, ModelSpec};
use serde::Serialize;
use std::time::Instant;

/// Codec of this part: one that needs no calibration.
const CODEC: &str = "kivi-4";

/// Outcome of a restart.
#[derive(Clone, Debug, Serialize)]
pub struct RestartReport {
    /// Tokens of the prompt that the second daemon had from disk.
    pub prefix_tokens: u32,
    /// Time to begin a sequence with them: read, verified and in the pool.
    pub milliseconds: f64,
    /// Tokens written after the prompt by both, and how many of them were the same from the start.
    pub tokens: usize,
    /// See `tokens`.
    pub same_tokens: usize,
}

/// The prompt, and what the first daemon went on with.
pub struct RestartDemo {
    subject: DemoSubject,
    chunk: usize,
    new_tokens: usize,
    written: Vec<u32>,
}

impl RestartDemo {
    /// Reads the model and the prompt.
    ///
    /// # Errors
    /// When the model cannot be read, or the prompt has no whole page to publish.
    pub fn load_prompt(options: &DemoOptions) -> Result<Self> {
        let subject = DemoSubject::load_subject(options)?;
        let (chunk, new_tokens) = (options.chunk_tokens, options.new_tokens);
        Ok(Self { subject, chunk, new_tokens, written: Vec::new() })
    }

    async fn register_model(&self, client: &Client) -> Result<RegisteredPrompt> {
        let info = client.server_info().await?;
        let geometry = self.subject.model.config().kv_geometry(info.block_tokens_default)?;
        let block = geometry.block_tokens as usize;
        // The last page is computed: the model answers for its last token.
        let pages = (self.subject.prompt.len() - 1) / block;
        ensure!(pages > 0, "a prompt of {} tokens has no page", self.subject.prompt.len());
        let name = crate::model_name(&self.subject.assets.name);
        let weights = name.clone().into_bytes().into();
        let spec =
            ModelSpec { name, geometry, codec: CODEC.to_owned(), calibration: Default::default() };
        let identity = ModelIdentity { weights, ..ModelIdentity::default() };
        let model = client.register_identified(spec, identity).await?.model;
        let keys = (0..pages as u64).flat_map(u64::to_be_bytes).collect();
        let keys = BlockKeys { keys, key_bytes: 8, key_tokens: 0 };
        Ok(RegisteredPrompt { model, keys, prefix: pages * block })
    }

    /// Tokens after the prompt, whose first `start` tokens are there.
    async fn write_on(&self, start: usize, kvd: &mut KvdAttention) -> Result<Vec<u32>> {
        let model = &self.subject.model;
        let vocabulary = model.config().vocab_size;
        let (mut position, mut logits) = (start, Vec::new());
        for tokens in self.subject.prompt[start..].chunks(self.chunk) {
            logits = model.forward_tokens(tokens, position, kvd).await?;
            position += tokens.len();
        }
        let mut written = Vec::new();
        while written.len() < self.new_tokens {
            let next = most_likely(&logits[logits.len().saturating_sub(vocabulary)..]);
            written.push(next);
            logits = model.forward_tokens(&[next], position, kvd).await?;
            position += 1;
        }
        Ok(written)
    }

    /// Has a daemon read the prompt, publishes it, and goes on. When this returns, the pages are on
    /// the daemon's disk.
    ///
    /// # Errors
    /// When the daemon does not do it, or has no disk.
    pub async fn publish_prompt(&mut self, endpoint: &Endpoint) -> Result<()> {
        let client = Client::connect(endpoint.clone()).await.context("the first daemon")?;
        let registered = self.register_model(&client).await?;
        let heads = self.subject.model.config().attention_heads();
        let mut kvd = KvdAttention::open_sequence(&client, registered.model, heads).await?;
        for (index, tokens) in
            self.subject.prompt[..registered.prefix].chunks(self.chunk).enumerate()
        {
            let position = index * self.chunk;
            self.subject.model.forward_tokens(tokens, position, &mut kvd).await?;
        }
        kvd.publish_prefix(registered.keys).await?;
        self.written = self.write_on(registered.prefix, &mut kvd).await?;
        Ok(())
    }

    /// Goes on with the prompt in another daemon, from what is on disk.
    ///
    /// # Errors
    /// When the daemon does not do it, or finds nothing.
    pub async fn resume_prompt(&self, endpoint: &Endpoint) -> Result<RestartReport> {
        let client = Client::connect(endpoint.clone()).await.context("the second daemon")?;
        let registered = self.register_model(&client).await?;
        let heads = self.subject.model.config().attention_heads();
        let mut kvd = KvdAttention::open_sequence(&client, registered.model, heads).await?;
        let begin = Instant::now();
        let length = kvd.begin_with_prefix(registered.keys).await?;
        let milliseconds = begin.elapsed().as_secs_f64() * 1e3;
        ensure!(length > 0, "the daemon found nothing of the prompt on its disk");
        let written = self.write_on(length as usize, &mut kvd).await?;
        let same = written.iter().zip(&self.written).take_while(|(a, b)| a == b).count();
        Ok(RestartReport {
            prefix_tokens: length,
            milliseconds,
            tokens: written.len(),
            same_tokens: same,
        })
    }
}

/// The prompt in a daemon.
struct RegisteredPrompt {
    model: ModelId,
    keys: BlockKeys,
    /// Tokens that are published.
    prefix: usize,
}

fn most_likely(logits: &[f32]) -> u32 {
    let best = (0u32..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |best| best.0)
}
