//! `kvd describe`: all that is known of a codec, or of a model that a daemon has.

use super::CliError;
use super::ask_daemon::{DaemonArgs, format_bytes, json_text};
use super::help;
use super::models::{ModelRow, find_description};
use super::text_args::refused_codec;
use clap::{Args, Subcommand};
use kvd_client::ModelDescription;
use kvd_codec::{presets, resolve_spec};
use kvd_core::Side;
use kvd_proto::v1::{DType, RopePairing};
use serde::Serialize;

#[derive(Subcommand)]
pub(super) enum DescribeCommand {
    /// A preset or a codec spec: what it is made of, and what it needs.
    #[command(after_help = help::DESCRIBE_CODEC)]
    Codec(DescribeCodecArgs),
    /// A registered model: geometry, codec, bytes.
    #[command(after_help = help::DESCRIBE_MODEL)]
    Model(DescribeModelArgs),
}

#[derive(Args)]
pub(super) struct DescribeCodecArgs {
    /// A preset's name, as `kvd codecs` lists them, or a spec.
    #[arg(value_name = "CODEC")]
    codec: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct DescribeModelArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The model, by its name or id.
    #[arg(value_name = "MODEL")]
    model: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A codec, in full.
#[derive(Serialize)]
struct CodecDescription {
    codec: String,
    spec: String,
    summary: Option<&'static str>,
    choose_when: Option<&'static str>,
    source: Option<&'static str>,
    needs_calibration: bool,
    /// First tokens that stay as they arrived, and last ones.
    sink: u32,
    recent: u32,
    /// Bits per value of keys and values, in words.
    bits_k: String,
    bits_v: String,
}

/// A model, in full.
#[derive(Serialize)]
struct FullModel {
    #[serde(flatten)]
    row: ModelRow,
    codec_spec: String,
    fingerprint: String,
    layers: u32,
    kv_heads: u32,
    head_dim_k: u32,
    head_dim_v: u32,
    block_tokens: u32,
    /// `f32`, `f16` or `bf16`.
    dtype: &'static str,
    /// `half` or `interleaved`.
    rope_pairing: &'static str,
}

/// Runs the command; what it prints.
pub(super) async fn run_command(command: DescribeCommand) -> Result<String, CliError> {
    match command {
        DescribeCommand::Codec(args) => {
            let described = describe_codec(&args.codec)?;
            if args.json { json_text(&described) } else { Ok(codec_text(&described)) }
        }
        DescribeCommand::Model(args) => {
            let client = args.daemon.connect_client().await?;
            let described = find_description(&client, &args.model).await?;
            let model = full_model(described)?;
            if args.json { json_text(&model) } else { Ok(model_text(&model)) }
        }
    }
}

fn describe_codec(codec: &str) -> Result<CodecDescription, CliError> {
    let spec = resolve_spec(codec)
        .map_err(|error| CliError::Usage(format!("no codec:{}", refused_codec(error))))?;
    let preset = presets().iter().find(|preset| preset.name == codec);
    let bits = |side| {
        let of_side = spec.side(side);
        match of_side.quantizer.target_bits() {
            Some(rate) => format!("about {rate}, everything counted, by its fit"),
            None => of_side.implied_bits(&super::codecs::GEOMETRY, side).to_string(),
        }
    };
    let [bits_k, bits_v] = Side::BOTH.map(bits);
    Ok(CodecDescription {
        codec: codec.to_owned(),
        spec: spec.to_string(),
        summary: preset.map(|preset| preset.summary),
        choose_when: preset.map(|preset| preset.choose_when),
        source: preset.map(|preset| preset.source),
        needs_calibration: spec.needs_calibration(),
        sink: spec.sink,
        recent: spec.recent,
        bits_k,
        bits_v,
    })
}

fn codec_text(codec: &CodecDescription) -> String {
    let calibration = if codec.needs_calibration { "yes, see kvd calibrate" } else { "no" };
    let lines = [
        ("codec", Some(codec.codec.as_str())),
        ("summary", codec.summary),
        ("take it when", codec.choose_when),
        ("spec", Some(codec.spec.as_str())),
        ("bits of k", Some(codec.bits_k.as_str())),
        ("bits of v", Some(codec.bits_v.as_str())),
        ("calibration", Some(calibration)),
        ("source", codec.source),
    ];
    let mut text = String::new();
    for (name, value) in lines {
        if let Some(value) = value {
            text.push_str(&format!("{name:<13} {value}\n"));
        }
    }
    text + &format!("{:<13} first {} and last {} tokens\n", "raw windows", codec.sink, codec.recent)
}

fn full_model(described: ModelDescription) -> Result<FullModel, CliError> {
    let incomplete = || anyhow::anyhow!("the daemon's answer has no geometry or no counts");
    let row = ModelRow::of_description(&described).ok_or_else(incomplete)?;
    let geometry = described.geometry.ok_or_else(incomplete)?;
    let dtype = match geometry.dtype() {
        DType::DtypeF32 => "f32",
        DType::DtypeF16 => "f16",
        DType::DtypeBf16 => "bf16",
        DType::DtypeUnspecified => "unknown",
    };
    let rope_pairing = match geometry.rope_pairing() {
        RopePairing::Half => "half",
        RopePairing::Interleaved => "interleaved",
        RopePairing::Unspecified => "unknown",
    };
    Ok(FullModel {
        row,
        codec_spec: described.codec_spec,
        fingerprint: described.fingerprint,
        layers: geometry.layers,
        kv_heads: geometry.kv_heads,
        head_dim_k: geometry.head_dim_k,
        head_dim_v: geometry.head_dim_v,
        block_tokens: geometry.block_tokens,
        dtype,
        rope_pairing,
    })
}

fn model_text(model: &FullModel) -> String {
    let FullModel { row, layers, kv_heads, head_dim_k, head_dim_v, block_tokens, .. } = model;
    let geometry = format!(
        "{layers} layers, {kv_heads} KV heads of {head_dim_k} (k) and {head_dim_v} (v), pages of \
         {block_tokens} tokens"
    );
    let held =
        format!("{}, {} saved", format_bytes(row.held_bytes), format_bytes(row.saved_bytes()));
    let lines = [
        ("model", row.model_id.clone()),
        ("name", row.name.clone()),
        ("geometry", geometry),
        ("dtype", model.dtype.to_owned()),
        ("rope pairing", model.rope_pairing.to_owned()),
        ("codec", row.codec.clone()),
        ("spec", model.codec_spec.clone()),
        ("fingerprint", model.fingerprint.clone()),
        ("sequences", row.sequences.to_string()),
        ("held", held),
    ];
    lines.iter().map(|(name, value)| format!("{name:<13} {value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_client::ModelStats;
    use kvd_proto::v1::Geometry;

    #[test]
    fn a_model_is_described_with_all_that_another_registration_has_to_repeat() {
        let geometry = Geometry {
            layers: 2,
            kv_heads: 4,
            head_dim_k: 64,
            head_dim_v: 32,
            block_tokens: 128,
            dtype: DType::DtypeBf16.into(),
            rope_pairing: RopePairing::Interleaved.into(),
        };
        let described = ModelDescription {
            model: Some(ModelStats { stored: Some(Default::default()), ..Default::default() }),
            geometry: Some(geometry),
            ..Default::default()
        };
        let model = full_model(described).unwrap();
        let (text, json) = (model_text(&model), json_text(&model).unwrap());
        assert!(text.contains("2 layers, 4 KV heads of 64 (k) and 32 (v), pages of 128"), "{text}");
        assert!(text.contains("dtype         bf16\nrope pairing  interleaved\n"), "{text}");
        assert!(json.contains("\"dtype\": \"bf16\""), "{json}");
        assert!(json.contains("\"rope_pairing\": \"interleaved\""), "{json}");
    }

    #[test]
    fn presets_and_specs_are_described_and_others_refused() {
        let preset = codec_text(&describe_codec("kivi-4").unwrap());
        assert!(preset.contains("summary") && preset.contains("calibration   no"), "{preset}");
        let spec = describe_codec("kivi-4").unwrap().spec;
        let same = describe_codec(&spec).unwrap();
        assert_eq!((same.spec.clone(), same.summary), (spec, None));
        let error = describe_codec("kivi-400").err().unwrap().to_string();
        assert!(error.contains("kivi-400") && error.contains("kvd codecs"), "{error}");
    }
}
