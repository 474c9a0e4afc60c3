//! Registering a model.

use super::payload;
use crate::{RequestError, v1};
use bytes::Bytes;
use kvd_core::{Geometry, ModelId, RopePairing};

/// A model to register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSpec {
    /// For people and metric labels: 1 to [`ModelSpec::NAME_LENGTH_MAX`] characters of
    /// `a-z A-Z 0-9 . _ - /`.
    pub name: String,
    /// Shape of the KV cache. Towards the daemon, `block_tokens` 0 asks for its default.
    pub geometry: Geometry,
    /// Preset or codec spec.
    pub codec: String,
    /// Calibration artefact; empty when the codec needs none.
    pub calibration: Bytes,
}

impl ModelSpec {
    /// Codec where a registration names none: good without a calibration.
    pub const CODEC_DEFAULT: &str = "kivi-4";
    /// Longest codec text, in bytes: a policy that names both sides of each of a thousand layers.
    pub const CODEC_LENGTH_MAX: u64 = 1 << 17;
    /// Longest name, in bytes.
    pub const NAME_LENGTH_MAX: usize = 128;

    /// Reads a request; `block_tokens_default` stands in where the caller leaves the choice.
    ///
    /// # Errors
    /// The first field that is missing or out of range.
    pub fn from_wire(
        request: v1::RegisterModelRequest,
        block_tokens_default: u32,
    ) -> Result<Self, RequestError> {
        check_name(&request.name)?;
        check_segments(&request.name)?;
        let codec = with_windows(request.codec, request.windows);
        let given = codec.len() as u64;
        if given > Self::CODEC_LENGTH_MAX {
            let max = Self::CODEC_LENGTH_MAX;
            return Err(RequestError::OverLimit { field: "codec length", given, max });
        }
        let mut wire = request.geometry.ok_or(RequestError::Missing { field: "geometry" })?;
        if wire.block_tokens == 0 {
            wire.block_tokens = block_tokens_default;
        }
        Ok(Self {
            name: request.name,
            geometry: geometry_from_wire(wire)?,
            codec,
            calibration: request.calibration,
        })
    }
}

/// The text of a codec with windows in place of its own.
fn with_windows(codec: String, windows: Option<v1::Windows>) -> String {
    let mut text = if codec.is_empty() { ModelSpec::CODEC_DEFAULT.to_owned() } else { codec };
    let v1::Windows { sink, recent } = windows.unwrap_or_default();
    for (name, tokens) in [("sink", sink), ("recent", recent)] {
        if let Some(tokens) = tokens {
            // A comment ends with its line.
            text.push_str(&format!("\n; {name}={tokens}"));
        }
    }
    text
}

impl From<ModelSpec> for v1::RegisterModelRequest {
    fn from(spec: ModelSpec) -> Self {
        Self {
            name: spec.name,
            geometry: Some((&spec.geometry).into()),
            codec: spec.codec,
            calibration: spec.calibration,
            windows: None,
            identity: None,
        }
    }
}

/// A registered model, as the daemon understood it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisteredModel {
    /// Handle for every later call.
    pub model: ModelId,
    /// The codec in full.
    pub codec_spec: String,
    /// Hash of geometry, codec and calibration.
    pub fingerprint: String,
    /// The geometry with defaults filled in.
    pub geometry: Geometry,
}

impl From<RegisteredModel> for v1::RegisterModelResponse {
    fn from(model: RegisteredModel) -> Self {
        Self {
            model_id: model.model.0,
            codec_spec: model.codec_spec,
            fingerprint: model.fingerprint,
            geometry: Some((&model.geometry).into()),
        }
    }
}

impl TryFrom<v1::RegisterModelResponse> for RegisteredModel {
    type Error = RequestError;

    fn try_from(response: v1::RegisterModelResponse) -> Result<Self, RequestError> {
        let geometry = response.geometry.ok_or(RequestError::Missing { field: "geometry" })?;
        Ok(Self {
            model: ModelId(response.model_id),
            codec_spec: response.codec_spec,
            fingerprint: response.fingerprint,
            geometry: geometry_from_wire(geometry)?,
        })
    }
}

impl From<&Geometry> for v1::Geometry {
    fn from(geometry: &Geometry) -> Self {
        let rope_pairing = match geometry.rope_pairing {
            RopePairing::Half => v1::RopePairing::Half,
            RopePairing::Interleaved => v1::RopePairing::Interleaved,
        };
        Self {
            layers: geometry.layers,
            kv_heads: geometry.kv_heads,
            head_dim_k: geometry.head_dim_k,
            head_dim_v: geometry.head_dim_v,
            block_tokens: geometry.block_tokens,
            dtype: payload::dtype_to_wire(geometry.dtype),
            rope_pairing: rope_pairing.into(),
        }
    }
}

impl TryFrom<v1::Geometry> for Geometry {
    type Error = RequestError;

    fn try_from(wire: v1::Geometry) -> Result<Self, RequestError> {
        geometry_from_wire(wire)
    }
}

fn geometry_from_wire(wire: v1::Geometry) -> Result<Geometry, RequestError> {
    let rope_pairing = match v1::RopePairing::try_from(wire.rope_pairing) {
        Ok(v1::RopePairing::Unspecified | v1::RopePairing::Half) => RopePairing::Half,
        Ok(v1::RopePairing::Interleaved) => RopePairing::Interleaved,
        Err(_) => {
            let reason = format!("rope pairing {} is not known", wire.rope_pairing);
            return Err(RequestError::invalid_field("geometry.rope_pairing", reason));
        }
    };
    let geometry = Geometry {
        layers: wire.layers,
        kv_heads: wire.kv_heads,
        head_dim_k: wire.head_dim_k,
        head_dim_v: wire.head_dim_v,
        block_tokens: wire.block_tokens,
        dtype: payload::dtype_required(wire.dtype, "geometry.dtype")?,
        rope_pairing,
    };
    geometry
        .validate_fields()
        .map_err(|error| RequestError::invalid_field("geometry", error.to_string()))?;
    Ok(geometry)
}

/// Refuses a name that is no metric label of bounded length.
pub(super) fn check_name(name: &str) -> Result<(), RequestError> {
    if name.is_empty() {
        return Err(RequestError::Missing { field: "name" });
    }
    let max = ModelSpec::NAME_LENGTH_MAX;
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/');
    if name.len() > max || !name.chars().all(allowed) {
        let reason = format!("must be 1 to {max} characters of a-z A-Z 0-9 . _ - /");
        return Err(RequestError::invalid_field("name", reason));
    }
    Ok(())
}

/// Refuses a name that a program would take for another, or for one outside, as a path. Model hubs
/// write `owner/model`.
fn check_segments(name: &str) -> Result<(), RequestError> {
    match name.split('/').find(|segment| matches!(*segment, "" | "." | "..")) {
        Some(segment) => {
            let reason = format!("{name:?} has the segment {segment:?} between its slashes");
            Err(RequestError::invalid_field("name", reason))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::DType;

    fn spec() -> ModelSpec {
        ModelSpec {
            name: "llama-3.1_8b".into(),
            geometry: Geometry {
                layers: 32,
                kv_heads: 8,
                head_dim_k: 128,
                head_dim_v: 128,
                block_tokens: 64,
                dtype: DType::BF16,
                rope_pairing: RopePairing::Interleaved,
            },
            codec: "kvd-3".into(),
            calibration: Bytes::from_static(b"c"),
        }
    }

    fn refusal(change: impl FnOnce(&mut v1::RegisterModelRequest)) -> String {
        let mut request = spec().into();
        change(&mut request);
        ModelSpec::from_wire(request, 64).unwrap_err().to_string()
    }

    #[test]
    fn an_empty_codec_is_the_default_and_windows_follow_the_codec() {
        let codec = |change: fn(&mut v1::RegisterModelRequest)| {
            let mut request = v1::RegisterModelRequest::from(spec());
            change(&mut request);
            ModelSpec::from_wire(request, 64).unwrap().codec
        };
        assert_eq!(codec(|r| r.codec.clear()), "kivi-4");
        let recent = |r: &mut v1::RegisterModelRequest| {
            r.windows = Some(v1::Windows { sink: None, recent: Some(0) });
        };
        assert_eq!(codec(recent), "kvd-3\n; recent=0");
        let both = |r: &mut v1::RegisterModelRequest| {
            r.codec.clear();
            r.windows = Some(v1::Windows { sink: Some(4), recent: Some(96) });
        };
        assert_eq!(codec(both), "kivi-4\n; sink=4\n; recent=96");
    }

    #[test]
    fn spec_round_trips() {
        assert_eq!(ModelSpec::from_wire(spec().into(), 16).unwrap(), spec());
    }

    #[test]
    fn names_of_model_hubs_are_taken() {
        for name in [
            "meta-llama/Llama-3.1-8B-Instruct",
            &format!("{}ab", "a/".repeat(63)),
            "..a/b..",
            "...",
        ] {
            let named = ModelSpec { name: name.to_owned(), ..spec() };
            assert_eq!(ModelSpec::from_wire(named.into(), 64).unwrap().name, name);
        }
    }

    #[test]
    fn zero_block_tokens_takes_the_default() {
        let mut asked = spec();
        asked.geometry.block_tokens = 0;
        let read = ModelSpec::from_wire(asked.into(), 128).unwrap();
        assert_eq!(read.geometry.block_tokens, 128);
    }

    #[test]
    fn refusals_name_the_field() {
        assert_eq!(refusal(|r| r.name.clear()), "name is missing");
        assert!(refusal(|r| r.name = "a b".into()).starts_with("name: must be 1 to 128"));
        for name in ["a/../b", "..", "./a", "a/.", "/x", "x/", "a//b", "/"] {
            let refused = refusal(|r| r.name = name.into());
            assert!(refused.starts_with("name: ") && refused.contains("segment"), "{refused}");
        }
        assert!(refusal(|r| r.name = "a".repeat(129)).starts_with("name: must be 1 to 128"));
        assert!(refusal(|r| r.name = "mod\u{e8}le".into()).starts_with("name: must be"));
        assert_eq!(refusal(|r| r.geometry = None), "geometry is missing");
        assert!(refusal(|r| r.codec = "x".repeat(131_073)).contains("maximum is 131072"));
        let geometry =
            |change: fn(&mut v1::Geometry)| refusal(|r| change(r.geometry.as_mut().unwrap()));
        assert_eq!(geometry(|g| g.dtype = 0), "geometry.dtype is missing");
        assert_eq!(geometry(|g| g.dtype = 9), "geometry.dtype: dtype 9 is not known");
        assert!(geometry(|g| g.rope_pairing = 7).starts_with("geometry.rope_pairing: "));
        assert!(geometry(|g| g.layers = 0).contains("geometry.layers is 0"));
    }

    #[test]
    fn registered_model_round_trips() {
        let model = RegisteredModel {
            model: ModelId(7),
            codec_spec: "k:…".into(),
            fingerprint: "f00".into(),
            geometry: spec().geometry,
        };
        let wire = v1::RegisterModelResponse::from(model.clone());
        assert_eq!(RegisteredModel::try_from(wire).unwrap(), model);
    }
}
