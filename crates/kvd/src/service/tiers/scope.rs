//! Scopes: what a block's bytes depend on, as a name that means the same on every machine and after
//! every restart. Pure.

use crate::service::register::NamedContent;
use kvd_core::{DType, RopePairing};
use kvd_proto::domain::ModelIdentity;
use kvd_tier::ScopeId;

/// Version of what a record holds, beside the tier's own: forms, tables, and this description.
const RECORD_VERSION: u32 = 1;

/// The scope of a registration; none where nobody names the weights: two fine-tunes of one model
/// would share it.
pub(crate) fn scope_of(content: &NamedContent<'_>) -> Option<ScopeId> {
    let NamedContent { geometry, codec, calibration, identity, namespace } = *content;
    let ModelIdentity { weights, tp_rank, tp_size, first_layer } = identity;
    if weights.is_empty() {
        return None;
    }
    let mut hash = blake3::Hasher::new();
    let mut add = |bytes: &[u8]| {
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    add(b"kvd scope");
    let dtype: u32 = match geometry.dtype {
        DType::F32 => 1,
        DType::F16 => 2,
        DType::BF16 => 3,
    };
    let pairing: u32 = match geometry.rope_pairing {
        RopePairing::Half => 1,
        RopePairing::Interleaved => 2,
    };
    let numbers = [
        RECORD_VERSION,
        kvd_codec::PAGE_FORMAT_VERSION.into(),
        *tp_rank,
        *tp_size,
        *first_layer,
        geometry.layers,
        geometry.kv_heads,
        geometry.head_dim_k,
        geometry.head_dim_v,
        geometry.block_tokens,
        dtype,
        pairing,
    ];
    numbers.iter().for_each(|number| add(&number.to_le_bytes()));
    add(weights);
    add(codec.to_string().as_bytes());
    match calibration {
        [] => add(b""),
        bytes => add(blake3::hash(bytes).as_bytes()),
    }
    add(namespace.as_str().as_bytes());
    let digest = hash.finalize();
    digest.as_bytes().first_chunk().map(|first| ScopeId(*first))
}

/// The word of a scope by which the index hashes its keys.
pub(crate) fn scope_word(scope: ScopeId) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = scope.0;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::{Geometry, Namespace};

    #[test]
    fn whatever_bytes_depend_on_makes_another_scope() {
        let geometry = Geometry {
            layers: 2,
            kv_heads: 2,
            head_dim_k: 64,
            head_dim_v: 64,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let identity = ModelIdentity { weights: "a@1".into(), ..ModelIdentity::default() };
        let (codec, other) = (
            kvd_codec::resolve_spec("kivi-4").unwrap(),
            kvd_codec::resolve_spec("kivi-2").unwrap(),
        );
        let (first, second) = (Namespace::new("first").unwrap(), Namespace::new("second").unwrap());
        let base = NamedContent {
            geometry: &geometry,
            codec: &codec,
            calibration: b"",
            identity: &identity,
            namespace: &first,
        };
        let wide = Geometry { kv_heads: 4, ..geometry.clone() };
        let rank = ModelIdentity { tp_rank: 1, ..identity.clone() };
        let weights = ModelIdentity { weights: "a@2".into(), ..identity.clone() };
        let all = [
            base,
            NamedContent { geometry: &wide, ..base },
            NamedContent { codec: &other, ..base },
            NamedContent { calibration: b"x", ..base },
            NamedContent { identity: &rank, ..base },
            NamedContent { identity: &weights, ..base },
            NamedContent { namespace: &second, ..base },
        ];
        let scopes: std::collections::BTreeSet<_> = all.iter().map(|of| scope_of(of)).collect();
        assert_eq!(scopes.len(), all.len());
        assert!(!scopes.contains(&None) && scopes.contains(&scope_of(&base)));
        let nobody = ModelIdentity::default();
        assert_eq!(scope_of(&NamedContent { identity: &nobody, ..base }), None);
    }
}
