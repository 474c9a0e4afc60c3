//! An inference engine: one connection, one registered model, and its conversations.
//!
//! A conversation remembers what it stored, so that answers can be checked against it.

use crate::budget::ErrorPrecision;
use crate::codec;
use crate::rows::{LayerRows, ModelShape, from_bytes, to_bytes};
use crate::{BatchAnswer, QueryBatch, TestDaemon, TestRng};
use bytes::Bytes;
use kvd_client::{
    AttendBatch, AttendQuery, Client, ClientError, DType, Endpoint, ErrorCode, LayerIndex,
    LoadRange, ModelId, ModelSpec, SequenceId, StoreAck, StoreChunk,
};
use std::fmt::Debug;

/// An engine to be.
pub struct EnginePlan {
    endpoint: Endpoint,
    client: Option<Client>,
    name: String,
    calibration: Option<Bytes>,
}

/// An engine that talks to `daemon`.
#[must_use]
pub fn engine(daemon: &TestDaemon) -> EnginePlan {
    engine_at(daemon.endpoint())
}

/// An engine that talks to the daemon at this address.
#[must_use]
pub fn engine_at(endpoint: Endpoint) -> EnginePlan {
    EnginePlan { endpoint, client: None, name: "model".to_owned(), calibration: None }
}

impl EnginePlan {
    /// Calls its model that.
    #[must_use]
    pub fn with_name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// Speaks through this connection.
    #[must_use]
    pub fn with_client(mut self, client: Client) -> Self {
        self.client = Some(client);
        self
    }

    /// Brings its own calibration instead of one for random rows.
    #[must_use]
    pub fn with_calibration(mut self, calibration: Bytes) -> Self {
        self.calibration = Some(calibration);
        self
    }

    /// Connects and registers its model.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub async fn register_model(self, shape: ModelShape, codec: &str) -> TestEngine {
        let client = match self.client {
            Some(client) => client,
            None => Client::connect(self.endpoint).await.expect("connect"),
        };
        let calibration =
            self.calibration.unwrap_or_else(|| codec::calibration_for_random(codec, &shape));
        let geometry = shape.geometry();
        let spec = ModelSpec { name: self.name, geometry, codec: codec.to_owned(), calibration };
        let model = client.register_model(spec).await.expect("register").model;
        TestEngine { client, model, shape, yardstick: codec::codec_precision(codec) }
    }
}

/// A connected engine.
#[derive(Clone)]
pub struct TestEngine {
    /// Its connection.
    pub client: Client,
    /// Its model.
    pub model: ModelId,
    /// The model's shape.
    pub shape: ModelShape,
    /// By what its answers are judged.
    pub yardstick: ErrorPrecision,
}

/// A sequence and the rows stored in it.
#[derive(Clone, Debug)]
pub struct StoredSequence {
    /// Its handle.
    pub sequence: SequenceId,
    /// Rows by layer.
    pub layers: Vec<LayerRows>,
}

impl StoredSequence {
    /// Tokens stored on every layer.
    #[must_use]
    pub fn length(&self) -> u32 {
        self.layers.iter().map(|rows| rows.tokens).min().unwrap_or(0)
    }
}

impl TestEngine {
    /// Begins a conversation.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub async fn open_sequence(&self) -> StoredSequence {
        let sequence = self.client.open_sequence(self.model).await.expect("open");
        let layers = vec![LayerRows::default(); self.shape.layers as usize];
        StoredSequence { sequence, layers }
    }

    /// Ends it.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub async fn close_sequence(&self, conversation: StoredSequence) {
        self.client.close_sequence(conversation.sequence).await.expect("close");
    }

    /// A conversation that begins with the first `length` tokens of another.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub async fn fork_sequence(&self, parent: &StoredSequence, length: u32) -> StoredSequence {
        let forked = self.client.fork_sequence(parent.sequence, Some(length)).await.expect("fork");
        assert_eq!(forked.length, length);
        let mut layers = parent.layers.clone();
        layers.iter_mut().for_each(|rows| rows.truncate_rows(&self.shape, length));
        StoredSequence { sequence: forked.sequence, layers }
    }

    /// Forgets all but the first `length` tokens.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub async fn truncate_sequence(&self, conversation: &mut StoredSequence, length: u32) {
        let truncated = self.client.truncate_sequence(conversation.sequence, length).await;
        truncated.expect("truncate");
        for rows in &mut conversation.layers {
            rows.truncate_rows(&self.shape, length);
        }
    }

    /// The store request of `rows` at `start`.
    #[must_use]
    pub fn store_chunk(
        &self,
        to: SequenceId,
        layer: u32,
        start: u32,
        rows: &LayerRows,
    ) -> StoreChunk {
        StoreChunk {
            sequence: to,
            layer: LayerIndex(layer),
            start,
            tokens: rows.tokens,
            k: to_bytes(self.shape.dtype, &rows.k),
            v: to_bytes(self.shape.dtype, &rows.v),
        }
    }

    /// Appends `rows` to one layer.
    ///
    /// # Errors
    /// The daemon's error; the conversation is then unchanged.
    pub async fn store_rows(
        &self,
        conversation: &mut StoredSequence,
        layer: u32,
        rows: &LayerRows,
    ) -> Result<StoreAck, ClientError> {
        let stored = &mut conversation.layers[layer as usize];
        let chunk = self.store_chunk(conversation.sequence, layer, stored.tokens, rows);
        let ack = self.client.store_chunk(chunk).await?;
        stored.extend_rows(rows);
        assert_eq!((ack.length, ack.replayed), (stored.tokens, false));
        Ok(ack)
    }

    /// Appends `tokens` random tokens to every layer.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub async fn grow_sequence(
        &self,
        conversation: &mut StoredSequence,
        tokens: u32,
        rng: &mut TestRng,
    ) {
        for layer in 0..self.shape.layers {
            let rows = LayerRows::random_rows(&self.shape, tokens, rng);
            self.store_rows(conversation, layer, &rows).await.expect("store");
        }
    }

    /// A random question of `n_q` tokens at the end of a conversation, to layer 0, in f32.
    #[must_use]
    pub fn random_question(
        &self,
        conversation: &StoredSequence,
        n_q: u32,
        rng: &mut TestRng,
    ) -> QueryBatch {
        self.question_of(vec![AttendQuery::new(conversation.sequence, n_q)], rng)
    }

    /// A random question to layer 0, in f32.
    #[must_use]
    pub fn question_of(&self, queries: Vec<AttendQuery>, rng: &mut TestRng) -> QueryBatch {
        let tokens: u32 = queries.iter().map(|query| query.n_q).sum();
        QueryBatch {
            layer: LayerIndex(0),
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries,
            q: rng.next_normals(tokens as usize * self.shape.q_width()),
        }
    }

    /// The request of a question.
    #[must_use]
    pub fn attend_batch(&self, question: &QueryBatch) -> AttendBatch {
        AttendBatch {
            model: self.model,
            layer: question.layer,
            q_heads: self.shape.q_heads(),
            dtype: question.dtype,
            scale: question.scale,
            soft_cap: question.soft_cap,
            queries: question.queries.clone(),
            q: to_bytes(question.dtype, &question.q),
            per_query_errors: false,
        }
    }

    /// Asks, and is answered.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub async fn ask_question(&self, question: &QueryBatch) -> BatchAnswer {
        self.try_ask(question).await.expect("attend")
    }

    /// Asks.
    ///
    /// # Errors
    /// The daemon's error.
    pub async fn try_ask(&self, question: &QueryBatch) -> Result<BatchAnswer, ClientError> {
        let attended = self.client.attend_batch(self.attend_batch(question)).await?;
        Ok(BatchAnswer { out: from_bytes(question.dtype, &attended.out), lse: attended.lse })
    }

    /// The rows of one layer of a conversation as they read back, unrounded.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub async fn load_layer(&self, conversation: &StoredSequence, layer: u32) -> LayerRows {
        let tokens = conversation.layers[layer as usize].tokens;
        let range = LoadRange {
            sequence: conversation.sequence,
            layer: LayerIndex(layer),
            start: 0,
            end: tokens,
            dtype: Some(DType::F32),
        };
        let loaded = self.client.load_rows(range).await.expect("load");
        let (k, v) = (from_bytes(DType::F32, &loaded.k), from_bytes(DType::F32, &loaded.v));
        LayerRows { tokens, k, v }
    }
}

/// Checks that a call was refused with `code`, and that its message says `says`.
///
/// # Panics
/// When it was not.
#[track_caller]
pub fn assert_refused<T: Debug>(result: Result<T, ClientError>, code: ErrorCode, says: &str) {
    let error = result.expect_err("the call was served");
    assert_eq!(error.code, Some(code), "{error}");
    assert!(error.message.contains(says), "{error} does not say {says:?}");
    assert_eq!(error.is_retryable(), code.is_retryable(), "{error}");
    assert_eq!(error.retry_after.is_some(), code.is_retryable(), "{error}: retry hint");
}
