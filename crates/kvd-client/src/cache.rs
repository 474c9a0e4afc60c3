//! Prefixes by key: what is cached, holding it, opening on it, and publishing.

use crate::client::Client;
use crate::error::ClientError;
use kvd_core::{LeaseId, ModelId, SequenceId, SessionId};
use kvd_proto::domain::{BlockKeys, ModelIdentity, ModelSpec, RegisteredModel};
use kvd_proto::v1;
use std::time::Duration;

/// The cached part of some chains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MatchedPrefixes {
    /// Keys of each chain, from its start.
    pub keys: Vec<u32>,
    /// As many tokens.
    pub tokens: Vec<u32>,
    /// Those of them that are in the daemon's pool; the others are on its disk.
    pub pool_tokens: Vec<u32>,
    /// Keeps them until it ends; none where nothing was matched or no lease was asked for.
    pub lease: Option<LeaseId>,
}

/// A sequence that was opened on a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenedPrefix {
    /// The sequence.
    pub sequence: SequenceId,
    /// Tokens that it has from the cache; the next one to store has this position.
    pub length: u32,
    /// First layers of them that may be read at once: calls that need others wait for these.
    pub ready_layers: u32,
}

/// Terms of an opening on a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpeningTerms {
    /// The session that is to own the sequence.
    pub session: Option<SessionId>,
    /// A lease that ends with it.
    pub lease: Option<LeaseId>,
    /// The answer may come once so many first layers of what is on disk are in the pool; 0: once
    /// all are. What does not come later is `RANGE_NOT_STORED` of the calls that need it.
    pub ready_layers: u32,
}

fn to_millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

fn to_wire(chains: &[BlockKeys]) -> Vec<v1::BlockKeys> {
    chains.iter().cloned().map(v1::BlockKeys::from).collect()
}

impl Client {
    /// [`Client::register_model`] of weights that are named: with others it is another model.
    ///
    /// # Errors
    /// As that.
    pub async fn register_identified(
        &self,
        spec: ModelSpec,
        identity: ModelIdentity,
    ) -> Result<RegisteredModel, ClientError> {
        let message = v1::RegisterModelRequest { identity: Some(identity.into()), ..spec.into() };
        let request = self.sized_request(message)?;
        let response = self.call_rpc(self.rpc.clone().register_model(request)).await?;
        RegisteredModel::try_from(response).map_err(|error| ClientError::invalid_reply(&error))
    }

    /// How much of each chain is cached. With a time other than none, a lease keeps it so long, or
    /// as long as the daemon grants.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, `INVALID_ARGUMENT` for keys that do not fit the model, `LIMIT_EXCEEDED`, or
    /// as every call.
    pub async fn match_prefixes(
        &self,
        model: ModelId,
        chains: &[BlockKeys],
        lease: Duration,
    ) -> Result<MatchedPrefixes, ClientError> {
        let (model_id, chains) = (model.0, to_wire(chains));
        let message = v1::MatchPrefixRequest { model_id, chains, lease_ms: to_millis(lease) };
        let request = self.sized_request(message)?;
        let response = self.call_rpc(self.rpc.clone().match_prefix(request)).await?;
        let v1::MatchPrefixResponse { matched_keys, matched_tokens, lease_id, pool_tokens } =
            response;
        let lease = (lease_id != 0).then_some(LeaseId(lease_id));
        Ok(MatchedPrefixes { keys: matched_keys, tokens: matched_tokens, pool_tokens, lease })
    }

    /// Ends a lease before its time.
    ///
    /// # Errors
    /// `UNKNOWN_LEASE` for one that has ended, or as every call.
    pub async fn release_lease(&self, lease: LeaseId) -> Result<(), ClientError> {
        let request = self.unary_request(v1::ReleaseLeaseRequest { lease_id: lease.0 });
        self.call_rpc(self.rpc.clone().release_lease(request)).await.map(drop)
    }

    /// Opens a sequence on the longest cached prefix of a chain, which may be none. A lease that is
    /// named ends with it.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, `UNKNOWN_SESSION`, `UNKNOWN_LEASE`, `LIMIT_EXCEEDED`, or as every call.
    pub async fn open_on_prefix(
        &self,
        model: ModelId,
        prefix: BlockKeys,
        session: Option<SessionId>,
        lease: Option<LeaseId>,
    ) -> Result<OpenedPrefix, ClientError> {
        let terms = OpeningTerms { session, lease, ready_layers: 0 };
        self.open_on_terms(model, prefix, terms).await
    }

    /// [`Client::open_on_prefix`], answered as early as the terms allow.
    ///
    /// # Errors
    /// As that.
    pub async fn open_on_terms(
        &self,
        model: ModelId,
        prefix: BlockKeys,
        terms: OpeningTerms,
    ) -> Result<OpenedPrefix, ClientError> {
        let OpeningTerms { session, lease, ready_layers } = terms;
        let request = self.sized_request(v1::OpenSequenceRequest {
            model_id: model.0,
            session_id: session.map_or(0, |session| session.0),
            prefix: Some(prefix.into()),
            lease_id: lease.map_or(0, |lease| lease.0),
            ready_layers,
        })?;
        let response = self.call_rpc(self.rpc.clone().open_sequence(request)).await?;
        let v1::OpenSequenceResponse { sequence_id, length, ready_layers } = response;
        Ok(OpenedPrefix { sequence: SequenceId(sequence_id), length, ready_layers })
    }

    /// Makes whole pages of a sequence findable from token `start` on.
    ///
    /// # Errors
    /// `UNKNOWN_SEQUENCE`, `RANGE_GAP`, `RANGE_NOT_STORED`, `INVALID_ARGUMENT`, or as every call.
    pub async fn publish_blocks(
        &self,
        sequence: SequenceId,
        start: u32,
        keys: BlockKeys,
    ) -> Result<v1::PublishBlocksResponse, ClientError> {
        let (sequence_id, keys) = (sequence.0, Some(keys.into()));
        let message = v1::PublishBlocksRequest { sequence_id, start, keys, ..Default::default() };
        self.send_publish(message).await
    }

    /// [`Client::publish_blocks`], and waits until the pages are on disk too, or will not be:
    /// `not_durable` of the answer says why.
    ///
    /// # Errors
    /// As that.
    pub async fn publish_durably(
        &self,
        sequence: SequenceId,
        start: u32,
        keys: BlockKeys,
    ) -> Result<v1::PublishBlocksResponse, ClientError> {
        let (sequence_id, keys) = (sequence.0, Some(keys.into()));
        let wait = v1::PublishWait::Disk.into();
        let message =
            v1::PublishBlocksRequest { sequence_id, start, keys, wait, ..Default::default() };
        self.send_publish(message).await
    }

    /// [`Client::publish_blocks`], after which the sequence itself reads the pages as every
    /// sequence does that finds them: both answer alike.
    ///
    /// # Errors
    /// As that.
    pub async fn publish_settled(
        &self,
        sequence: SequenceId,
        start: u32,
        keys: BlockKeys,
    ) -> Result<v1::PublishBlocksResponse, ClientError> {
        let (sequence_id, keys) = (sequence.0, Some(keys.into()));
        let settle = true;
        let message =
            v1::PublishBlocksRequest { sequence_id, start, keys, settle, ..Default::default() };
        self.send_publish(message).await
    }

    async fn send_publish(
        &self,
        message: v1::PublishBlocksRequest,
    ) -> Result<v1::PublishBlocksResponse, ClientError> {
        let request = self.sized_request(message)?;
        self.call_rpc(self.rpc.clone().publish_blocks(request)).await
    }

    /// [`Client::close_sequence`], and drops what it published unless others need it.
    ///
    /// # Errors
    /// As that.
    pub async fn close_and_drop(&self, sequence: SequenceId) -> Result<(), ClientError> {
        let keep_published = Some(false);
        let message = v1::CloseSequenceRequest {
            sequence_id: sequence.0,
            keep_published,
            ..Default::default()
        };
        let request = self.unary_request(message);
        self.call_rpc(self.rpc.clone().close_sequence(request)).await.map(drop)
    }

    /// Keeps what is cached of chains, for a time or until it is unpinned.
    ///
    /// # Errors
    /// `LIMIT_EXCEEDED` of pinned bytes, `UNKNOWN_MODEL`, or as every call.
    pub async fn pin_blocks(
        &self,
        model: ModelId,
        chains: &[BlockKeys],
        ttl: Option<Duration>,
    ) -> Result<v1::PinBlocksResponse, ClientError> {
        let (model_id, chains) = (model.0, to_wire(chains));
        let ttl_ms = ttl.map_or(0, |ttl| to_millis(ttl).into());
        let request = self.sized_request(v1::PinBlocksRequest { model_id, chains, ttl_ms })?;
        self.call_rpc(self.rpc.clone().pin_blocks(request)).await
    }

    /// Takes the pins back that are on prefixes of chains; how many these were.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, or as every call.
    pub async fn unpin_blocks(
        &self,
        model: ModelId,
        chains: &[BlockKeys],
    ) -> Result<u64, ClientError> {
        let (model_id, chains) = (model.0, to_wire(chains));
        let request = self.sized_request(v1::UnpinBlocksRequest { model_id, chains })?;
        Ok(self.call_rpc(self.rpc.clone().unpin_blocks(request)).await?.unpinned)
    }

    /// Drops the cached blocks of chains, or, for none, of the model, unless something needs them.
    ///
    /// # Errors
    /// `UNKNOWN_MODEL`, or as every call.
    pub async fn drop_blocks(
        &self,
        model: ModelId,
        chains: &[BlockKeys],
    ) -> Result<v1::DropBlocksResponse, ClientError> {
        let (model_id, chains) = (model.0, to_wire(chains));
        let request = self.sized_request(v1::DropBlocksRequest { model_id, chains })?;
        self.call_rpc(self.rpc.clone().drop_blocks(request)).await
    }
}
