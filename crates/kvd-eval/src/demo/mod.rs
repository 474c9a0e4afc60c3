//! `kvd demo`: text, quality, storage and speed of a few codecs, for people.

mod evaluate;
mod options;
mod print;
mod report;
mod restart;
mod subject;

pub use options::DemoOptions;
pub use report::{CodecReport, DemoReport, DemoSetup, GeneratedText, ReferenceReport};
pub use restart::{RestartDemo, RestartReport};

use crate::eval::EvalCodec;
use crate::measure::MeasureRig;
use crate::progress::RunProgress;
use anyhow::{Context, Result};
use evaluate::DemoEvaluation;
use kvd_client::{Client, ServerInfo};
use std::io::Write;
use std::time::Instant;
use subject::{DemoReference, DemoSubject};

/// Runs the model without kvd and then once per codec through the daemon, and writes the report
/// to `out`.
///
/// The model computes on the calling thread between calls to the daemon: run it where blocking
/// for milliseconds is allowed, as in the future given to `block_on`.
///
/// # Errors
/// When the model or a codec cannot be read, or a call to the daemon fails.
pub async fn run_demo(options: DemoOptions, out: &mut (dyn Write + Send)) -> Result<DemoReport> {
    let begin = Instant::now();
    options.check_options()?;
    let under = |codec: &EvalCodec| EvalCodec {
        label: codec.label.clone(),
        spec: options.windows.apply_windows(codec.spec.clone()),
    };
    let codecs: Vec<EvalCodec> = options.codecs.iter().map(under).collect();
    let connected = Client::connect(options.endpoint.clone()).await;
    let client = connected.with_context(|| format!("no daemon at {}", options.endpoint))?;
    let info = client.server_info().await?;
    let subject = DemoSubject::load_subject(&options)?;
    let progress = RunProgress::new(expected_tokens(&options, &subject, &codecs));
    let reference = DemoReference::run_reference(&subject, &options, &progress).await?;
    let rig = MeasureRig {
        client: &client,
        model: &subject.model,
        geometry: subject.model.config().kv_geometry(info.block_tokens_default)?,
        chunk: options.chunk_tokens,
        metrics: options.metrics.clone(),
        progress: &progress,
    };
    let mut evaluation = DemoEvaluation {
        rig,
        subject: &subject,
        reference: &reference,
        options: &options,
        samples: None,
        runs: 0,
    };
    let mut reports = Vec::new();
    for codec in &codecs {
        let run = evaluation.run_codec(codec).await;
        reports.push(run.with_context(|| format!("codec {}", codec.label))?);
    }
    progress.remove_bar();
    let report = DemoReport {
        model: subject.model_report(),
        setup: describe_setup(&options, &info, &subject)?,
        without_kvd: reference.report,
        codecs: reports,
        restart: options.restart.clone(),
        seconds: begin.elapsed().as_secs_f64(),
    };
    if options.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        print::print_report(&report, out)?;
    }
    out.flush()?;
    Ok(report)
}

fn expected_tokens(options: &DemoOptions, subject: &DemoSubject, codecs: &[EvalCodec]) -> usize {
    let passages = options.passages * options.passage_tokens;
    let written = options.prompt_tokens + options.new_tokens;
    let clean_queries = options.passage_tokens - options.passage_tokens * 3 / 4;
    let clean_queries = clean_queries * subject.model.config().num_hidden_layers;
    let calibrated = codecs.iter().any(|codec| codec.spec.needs_calibration());
    let calibration = subject.calibration.len() * options.passage_tokens;
    let every_run = passages + written;
    every_run + usize::from(calibrated) * calibration + codecs.len() * (every_run + clean_queries)
}

fn describe_setup(
    options: &DemoOptions,
    info: &ServerInfo,
    subject: &DemoSubject,
) -> Result<DemoSetup> {
    // Enough of the prompt to see what the text goes on from.
    const TAIL_TOKENS: usize = 80;
    let tail = &subject.prompt[subject.prompt.len().saturating_sub(TAIL_TOKENS)..];
    let tail = subject.assets.decode_ids(tail)?;
    Ok(DemoSetup {
        endpoint: options.endpoint.to_string(),
        daemon_version: info.version.clone(),
        device: info.device.clone(),
        block_tokens: info.block_tokens_default,
        windows: options.windows.to_string(),
        passages: options.passages,
        passage_tokens: options.passage_tokens,
        scored_from: options.scored_from(),
        chunk_tokens: options.chunk_tokens,
        prompt_tokens: options.prompt_tokens,
        new_tokens: options.new_tokens,
        prompt_tail: tail.split_once('\n').map_or(tail.clone(), |(_, lines)| lines.to_owned()),
    })
}
