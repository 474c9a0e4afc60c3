//! Keys of cached prefixes, and whose weights a model's K and V come from. Whether keys fit a
//! model is for the store to say.

use crate::{RequestError, v1};
use bytes::Bytes;

/// Keys of a prefix, side by side, from its first token on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockKeys {
    /// The keys.
    pub keys: Bytes,
    /// Bytes of each: 1 to 64.
    pub key_bytes: u32,
    /// Tokens between one key and the next; 0: the model's page.
    pub key_tokens: u32,
}

impl BlockKeys {
    /// Keys, none of them for a length of 0.
    #[must_use]
    pub fn count_keys(&self) -> u64 {
        self.keys.len() as u64 / u64::from(self.key_bytes.max(1))
    }
}

impl From<v1::BlockKeys> for BlockKeys {
    fn from(wire: v1::BlockKeys) -> Self {
        let v1::BlockKeys { keys, key_bytes, key_tokens } = wire;
        Self { keys, key_bytes, key_tokens }
    }
}

impl From<BlockKeys> for v1::BlockKeys {
    fn from(of: BlockKeys) -> Self {
        let BlockKeys { keys, key_bytes, key_tokens } = of;
        Self { keys, key_bytes, key_tokens }
    }
}

/// The weights behind K and V, and the part of the model that is registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelIdentity {
    /// A checkpoint and its revision, or a digest of the weights: at most
    /// [`ModelIdentity::WEIGHTS_BYTES_MAX`] bytes.
    pub weights: Bytes,
    /// Which of the ranks of tensor parallelism.
    pub tp_rank: u32,
    /// How many there are; 0 where nothing is said of it.
    pub tp_size: u32,
    /// First layer of the whole model that is registered.
    pub first_layer: u32,
}

impl ModelIdentity {
    /// Longest name of weights, in bytes.
    pub const WEIGHTS_BYTES_MAX: u64 = 256;
}

impl TryFrom<v1::ModelIdentity> for ModelIdentity {
    type Error = RequestError;

    fn try_from(wire: v1::ModelIdentity) -> Result<Self, RequestError> {
        let v1::ModelIdentity { weights, tp_rank, tp_size, first_layer } = wire;
        let (given, max) = (weights.len() as u64, Self::WEIGHTS_BYTES_MAX);
        if given > max {
            return Err(RequestError::OverLimit { field: "identity.weights length", given, max });
        }
        if tp_rank > 0 && tp_rank >= tp_size {
            let reason = format!("{tp_rank} is no rank of identity.tp_size = {tp_size}");
            return Err(RequestError::invalid_field("identity.tp_rank", reason));
        }
        Ok(Self { weights, tp_rank, tp_size, first_layer })
    }
}

impl From<ModelIdentity> for v1::ModelIdentity {
    fn from(of: ModelIdentity) -> Self {
        let ModelIdentity { weights, tp_rank, tp_size, first_layer } = of;
        Self { weights, tp_rank, tp_size, first_layer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_identities_round_trip() {
        let keys = BlockKeys { keys: Bytes::from_static(b"abcdef"), key_bytes: 2, key_tokens: 16 };
        assert_eq!(BlockKeys::from(v1::BlockKeys::from(keys.clone())), keys);
        assert_eq!((keys.count_keys(), BlockKeys::default().count_keys()), (3, 0));
        let weights = Bytes::from_static(b"org/model@abc");
        let identity = ModelIdentity { weights, tp_rank: 1, tp_size: 2, first_layer: 8 };
        let wire = v1::ModelIdentity::from(identity.clone());
        assert_eq!(ModelIdentity::try_from(wire).unwrap(), identity);
    }

    #[test]
    fn identities_are_bounded() {
        let refusal =
            |wire: v1::ModelIdentity| ModelIdentity::try_from(wire).unwrap_err().to_string();
        let long = v1::ModelIdentity { weights: vec![0; 257].into(), ..Default::default() };
        assert_eq!(refusal(long), "identity.weights length is 257; the maximum is 256");
        let rank = v1::ModelIdentity { tp_rank: 2, tp_size: 2, ..Default::default() };
        assert!(refusal(rank).starts_with("identity.tp_rank: 2 is no rank"));
    }
}
