//! `kvd sequences`: what a daemon holds, and closing what nobody uses.

use super::CliError;
use super::ask_daemon::{
    DaemonArgs, format_bytes, format_time, json_text, parse_duration, shorten_text,
};
use super::help;
use super::sessions::find_session;
use super::table::{TableColumn, render_table};
use anyhow::anyhow;
use clap::{ArgGroup, Args, Subcommand};
use kvd_client::{
    Client, ClientError, ErrorCode, ModelId, SequenceFilter, SequenceId, SequenceInfo,
    SequencePhase,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Columns of a model's name.
const NAME_COLUMNS: usize = 16;

#[derive(Subcommand)]
pub(super) enum SequencesCommand {
    /// List open sequences: their model, session, length, age, idleness and bytes.
    #[command(after_help = help::SEQUENCES_LIST)]
    List(ListArgs),
    /// Close sequences by their ids, those of a session, or those that nobody uses.
    #[command(after_help = help::SEQUENCES_CLOSE)]
    Close(CloseArgs),
}

#[derive(Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Only those of this model, by its name or id.
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Only those of this session, by its name or id.
    #[arg(long, value_name = "SESSION")]
    session: Option<String>,
    /// Only those that no call has named for so long, as 90s, 10m or 2h.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    idle: Option<Duration>,
    /// Print JSON, which also has what `HintSequence` said: phase and parent.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
#[command(group(ArgGroup::new("which").args(["ids", "idle", "session"]).required(true)))]
pub(super) struct CloseArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Sequences by their ids.
    #[arg(value_name = "ID")]
    ids: Vec<u64>,
    /// Those that no call has named for so long, as 90s, 10m or 2h. One that is used meanwhile
    /// stays open.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    idle: Option<Duration>,
    /// Those of this session, by its name or id; the session goes on.
    #[arg(long, value_name = "SESSION")]
    session: Option<String>,
}

/// One line of the list. Ids are texts: they do not fit the numbers of every reader of JSON.
#[derive(Serialize)]
struct SequenceRow {
    sequence: String,
    model_id: String,
    model: String,
    /// Empty for one that no session owns.
    session: String,
    tokens: u32,
    age_ms: u64,
    idle_ms: u64,
    held_bytes: u64,
    /// The engine's last word on it: `end_of_turn`, `done`, or nothing.
    phase: &'static str,
    /// The sequence that it works for or was forked from; empty for none.
    parent: String,
}

/// Runs the command; what it prints.
pub(super) async fn run_command(command: SequencesCommand) -> Result<String, CliError> {
    match command {
        SequencesCommand::List(args) => list_sequences(args).await,
        SequencesCommand::Close(args) => close_sequences(args).await,
    }
}

async fn list_sequences(args: ListArgs) -> Result<String, CliError> {
    let client = args.daemon.connect_client().await?;
    let models = client.list_models().await.map_err(anyhow::Error::from)?;
    let stats = models.into_iter().filter_map(|model| model.model);
    let names: BTreeMap<u64, String> = stats.map(|model| (model.model_id, model.name)).collect();
    let mut filter = SequenceFilter {
        model: args.model.map(|model| find_model(&names, &model)).transpose()?,
        idle_min: args.idle.unwrap_or_default(),
        ..SequenceFilter::default()
    };
    if let Some(session) = args.session {
        filter.session = Some(find_session(&client, &session).await?);
    }
    let found = collect_sequences(&client, filter).await.map_err(anyhow::Error::from)?;
    let rows: Vec<_> = found.into_iter().map(|found| sequence_row(&names, found)).collect();
    if args.json { json_text(&rows) } else { Ok(sequence_table(&rows)) }
}

fn find_model(names: &BTreeMap<u64, String>, model: &str) -> Result<ModelId, anyhow::Error> {
    let by_name = names.iter().find(|(_, name)| *name == model).map(|(id, _)| *id);
    let id = by_name.or_else(|| model.parse().ok());
    id.map(ModelId).ok_or_else(|| anyhow!("no model {model:?} in this namespace"))
}

fn phase_name(phase: SequencePhase) -> &'static str {
    match phase {
        SequencePhase::Unspecified => "",
        SequencePhase::EndOfTurn => "end_of_turn",
        SequencePhase::Done => "done",
    }
}

fn id_text(id: u64) -> String {
    if id == 0 { String::new() } else { id.to_string() }
}

fn sequence_row(names: &BTreeMap<u64, String>, found: SequenceInfo) -> SequenceRow {
    let (stored, phase) = (found.stored.unwrap_or_default(), found.phase());
    SequenceRow {
        sequence: found.sequence_id.to_string(),
        model_id: found.model_id.to_string(),
        model: names.get(&found.model_id).cloned().unwrap_or_default(),
        session: id_text(found.session_id),
        tokens: found.length,
        age_ms: found.age_ms,
        idle_ms: found.idle_ms,
        held_bytes: stored.packed_bytes + stored.raw_bytes,
        phase: phase_name(phase),
        parent: id_text(found.parent_sequence_id),
    }
}

fn sequence_table(rows: &[SequenceRow]) -> String {
    if rows.is_empty() {
        return "no sequences\n".to_owned();
    }
    let cells = |cell: fn(&SequenceRow) -> String| rows.iter().map(cell).collect::<Vec<_>>();
    let session = |row: &SequenceRow| match &row.session[..] {
        "" => "-".to_owned(),
        session => session.to_owned(),
    };
    let text = render_table(&[
        TableColumn::of_text("sequence", cells(|row| row.sequence.clone())),
        TableColumn::of_text("model", cells(|row| shorten_text(&row.model, NAME_COLUMNS))),
        TableColumn::of_text("session", cells(session)),
        TableColumn::of_numbers("tokens", cells(|row| row.tokens.to_string())),
        TableColumn::of_numbers("age", cells(|row| format_time(row.age_ms))),
        TableColumn::of_numbers("idle", cells(|row| format_time(row.idle_ms))),
        TableColumn::of_numbers("held", cells(|row| format_bytes(row.held_bytes))),
    ]);
    let held = format_bytes(rows.iter().map(|row| row.held_bytes).sum());
    text + &format!(
        "{} in all; shared blocks are counted for each: {held}\n",
        count_text(rows.len())
    )
}

fn count_text(count: usize) -> String {
    format!("{count} {}", if count == 1 { "sequence" } else { "sequences" })
}

/// All pages of a list.
async fn collect_sequences(
    client: &Client,
    mut filter: SequenceFilter,
) -> Result<Vec<SequenceInfo>, ClientError> {
    let mut found = Vec::new();
    loop {
        let page = client.list_sequences(filter).await?;
        found.extend(page.sequences);
        if page.next_after_id == 0 {
            return Ok(found);
        }
        filter.after = Some(SequenceId(page.next_after_id));
    }
}

async fn close_sequences(args: CloseArgs) -> Result<String, CliError> {
    let client = args.daemon.connect_client().await?;
    if !args.ids.is_empty() {
        return close_by_id(&client, &args.ids).await;
    }
    let mut filter =
        SequenceFilter { idle_min: args.idle.unwrap_or_default(), ..Default::default() };
    if let Some(session) = args.session {
        filter.session = Some(find_session(&client, &session).await?);
    }
    let found = collect_sequences(&client, filter).await.map_err(anyhow::Error::from)?;
    let (mut closed, mut used) = (0, 0);
    for sequence in found.iter().map(|found| SequenceId(found.sequence_id)) {
        let answer = match args.idle {
            Some(idle) => client.close_idle_sequence(sequence, idle).await,
            None => client.close_sequence(sequence).await,
        };
        match answer {
            Ok(()) => closed += 1,
            Err(error) if error.code == Some(ErrorCode::SequenceBusy) => used += 1,
            // Whoever had it was quicker.
            Err(error) if error.code == Some(ErrorCode::UnknownSequence) => {}
            Err(error) => return Err(anyhow::Error::from(error).into()),
        }
    }
    let kept = if used > 0 { format!("; {used} used meanwhile") } else { String::new() };
    Ok(format!("closed {}{kept}\n", count_text(closed)))
}

/// Closes all that can be closed, and names those that cannot.
async fn close_by_id(client: &Client, ids: &[u64]) -> Result<String, CliError> {
    let mut failures = Vec::new();
    for id in ids {
        if let Err(error) = client.close_sequence(SequenceId(*id)).await {
            failures.push(error.to_string());
        }
    }
    let closed = format!("closed {}", count_text(ids.len() - failures.len()));
    if failures.is_empty() {
        return Ok(closed + "\n");
    }
    Err(anyhow!("{closed}; {}", failures.join("; ")).into())
}

#[cfg(test)]
mod tests {
    use super::super::table::{COLUMNS, columns_of};
    use super::*;

    #[test]
    fn the_widest_list_fits_a_terminal() {
        let names = BTreeMap::from([(u64::MAX, "meta-llama/Llama-3.1-8B-Instruct".to_owned())]);
        let info = SequenceInfo {
            sequence_id: u64::MAX,
            model_id: u64::MAX,
            session_id: u64::MAX,
            length: u32::MAX,
            age_ms: u64::MAX,
            idle_ms: u64::MAX,
            stored: Some(kvd_client::StoredBytes { packed_bytes: 999 << 30, ..Default::default() }),
            phase: SequencePhase::EndOfTurn.into(),
            parent_sequence_id: 5,
        };
        let free = SequenceInfo { session_id: 0, model_id: 1, ..info };
        let rows = [info, free].map(|info| sequence_row(&names, info));
        let text = sequence_table(&rows);
        assert!(columns_of(&text) <= COLUMNS, "{} columns:\n{text}", columns_of(&text));
        assert!(text.contains("…3.1-8B-Instruct") && text.contains("  -  "), "{text}");
        assert!(
            text.ends_with("\n2 sequences in all; shared blocks are counted for each: 2.0 TiB\n")
        );
        assert_eq!(sequence_table(&[]), "no sequences\n");
        let json = json_text(&rows).unwrap();
        assert!(json.contains("\"sequence\": \"18446744073709551615\""), "{json}");
        assert!(json.contains("\"phase\": \"end_of_turn\"") && json.contains("\"parent\": \"5\""));
    }

    #[test]
    fn models_are_found_by_name_and_by_id() {
        let names = BTreeMap::from([(7, "tiny".to_owned()), (8, "9".to_owned())]);
        assert_eq!(find_model(&names, "tiny").unwrap(), ModelId(7));
        assert_eq!(find_model(&names, "9").unwrap(), ModelId(8));
        assert_eq!(find_model(&names, "7").unwrap(), ModelId(7));
        assert!(find_model(&names, "large").unwrap_err().to_string().contains("\"large\""));
    }
}
