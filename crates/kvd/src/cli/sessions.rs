//! `kvd sessions`: who holds sequences at a daemon, and ending that.

use super::CliError;
use super::ask_daemon::{DaemonArgs, format_time, json_text, shorten_text};
use super::help;
use super::table::{TableColumn, render_table};
use anyhow::anyhow;
use clap::{Args, Subcommand};
use kvd_client::{Client, SessionInfo};
use kvd_core::SessionId;
use serde::Serialize;

/// Columns of a session's name, and of where its holder is.
const NAME_COLUMNS: usize = 20;
const PEER_COLUMNS: usize = 22;

#[derive(Subcommand)]
pub(super) enum SessionsCommand {
    /// List sessions, the oldest first: who holds them, and how many sequences they own.
    #[command(after_help = help::SESSIONS_LIST)]
    List(SessionListArgs),
    /// End a session, whoever holds it, and close its sequences.
    #[command(after_help = help::SESSIONS_CLOSE)]
    Close(SessionCloseArgs),
}

#[derive(Args)]
pub(super) struct SessionListArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(super) struct SessionCloseArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// The session, by its id or name.
    #[arg(value_name = "SESSION")]
    session: String,
}

/// One line of the list. The id is a text: it does not fit the numbers of every reader of JSON.
#[derive(Serialize)]
struct SessionRow {
    session: String,
    name: String,
    age_ms: u64,
    holders: u32,
    /// Absent while it is held.
    ends_in_ms: Option<u64>,
    ttl_ms: u32,
    sequences: u64,
    peer: String,
}

impl From<SessionInfo> for SessionRow {
    fn from(info: SessionInfo) -> Self {
        Self {
            session: info.session_id.to_string(),
            name: info.name,
            age_ms: info.age_ms,
            holders: info.holders,
            ends_in_ms: info.ends_in_ms,
            ttl_ms: info.ttl_ms,
            sequences: info.sequences,
            peer: info.peer,
        }
    }
}

/// Runs the command; what it prints.
pub(super) async fn run_command(command: SessionsCommand) -> Result<String, CliError> {
    match command {
        SessionsCommand::List(args) => {
            let client = args.daemon.connect_client().await?;
            let sessions = client.list_sessions().await.map_err(anyhow::Error::from)?;
            let rows: Vec<SessionRow> = sessions.into_iter().map(SessionRow::from).collect();
            if args.json { json_text(&rows) } else { Ok(session_table(&rows)) }
        }
        SessionsCommand::Close(args) => {
            let client = args.daemon.connect_client().await?;
            let session = find_session(&client, &args.session).await?;
            let closed = client.close_session(session).await.map_err(anyhow::Error::from)?;
            Ok(format!("closed session {session}, sequences: {closed}\n"))
        }
    }
}

/// A session by its name, or else by its id.
pub(super) async fn find_session(client: &Client, text: &str) -> Result<SessionId, CliError> {
    let sessions = client.list_sessions().await.map_err(anyhow::Error::from)?;
    let by_name = sessions.iter().find(|session| session.name == text);
    let id = by_name.map(|session| session.session_id).or_else(|| text.parse().ok());
    Ok(id.map(SessionId).ok_or_else(|| anyhow!("no session {text:?} in this namespace"))?)
}

fn session_table(rows: &[SessionRow]) -> String {
    if rows.is_empty() {
        return "no sessions\n".to_owned();
    }
    let cells = |cell: fn(&SessionRow) -> String| rows.iter().map(cell).collect::<Vec<_>>();
    let state = |row: &SessionRow| match row.ends_in_ms {
        None => "held".to_owned(),
        Some(ms) => format!("{} left", format_time(ms)),
    };
    render_table(&[
        TableColumn::of_text("session", cells(|row| row.session.clone())),
        TableColumn::of_text("name", cells(|row| shorten_text(&row.name, NAME_COLUMNS))),
        TableColumn::of_numbers("age", cells(|row| format_time(row.age_ms))),
        TableColumn::of_numbers("state", cells(state)),
        TableColumn::of_numbers("sequences", cells(|row| row.sequences.to_string())),
        TableColumn::of_text("holder", cells(|row| shorten_text(&row.peer, PEER_COLUMNS))),
    ])
}

#[cfg(test)]
mod tests {
    use super::super::table::{COLUMNS, columns_of};
    use super::*;

    #[test]
    fn the_widest_list_fits_a_terminal() {
        let held = SessionInfo {
            session_id: u64::MAX,
            name: "n".repeat(128),
            age_ms: u64::MAX,
            holders: 1,
            ends_in_ms: None,
            ttl_ms: 300_000,
            sequences: 1 << 20,
            peer: "[2001:db8:85a3:8d3:1319:8a2e:370:7348]:65535".to_owned(),
        };
        let peer = "unix, process 4194304".to_owned();
        let left = SessionInfo { ends_in_ms: Some(300_000), peer, ..held.clone() };
        let rows = [held, left].map(SessionRow::from);
        let text = session_table(&rows);
        assert!(columns_of(&text) <= COLUMNS, "{} columns:\n{text}", columns_of(&text));
        assert!(text.contains("  held  ") && text.contains("5 min left"), "{text}");
        assert!(text.contains("unix, process 4194304\n"), "{text}");
        assert_eq!(session_table(&[]), "no sessions\n");
    }
}
