//! `kvd top`: a daemon on one screen, drawn anew every few seconds. It asks by gRPC alone, so it
//! shows what its principal may see.

mod sample;
mod screen;

use super::CliError;
use super::ask_daemon::{DaemonArgs, parse_duration};
use clap::Args;
use kvd_client::{Client, SequenceId};
use ratatui::Terminal;
use ratatui::backend::{Backend, TestBackend};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind};
use sample::DaemonSample;
use screen::{SequenceOrder, TopScreen};
use std::time::{Duration, Instant};

/// Columns and lines of `--once` where no terminal says them.
const ONCE_SIZE: [u16; 2] = [80, 24];
/// How long a key is waited for before the clock is looked at.
const KEY_TIME: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(super) struct TopArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Time between two looks, as 500ms or 2s.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    interval: Duration,
    /// Print one screen of 80 columns after two looks, and end: for pipes and logs.
    #[arg(long)]
    once: bool,
}

/// Shows the screen until a key ends it; text to print after that.
pub(super) async fn run_top(args: TopArgs) -> Result<String, CliError> {
    let client = args.daemon.connect_client().await?;
    let mut screen = TopScreen::new(args.daemon.namespace_name());
    screen.add_sample(take_sample(&client).await?);
    if args.once {
        tokio::time::sleep(args.interval).await;
        screen.add_sample(take_sample(&client).await?);
        return draw_text(&mut screen, ONCE_SIZE);
    }
    let mut terminal = ratatui::try_init().map_err(|error| {
        anyhow::Error::from(error).context("the terminal; kvd top --once needs none")
    })?;
    let shown = show_screen(&mut terminal, &client, &mut screen, args.interval).await;
    ratatui::restore();
    shown.map(|()| String::new())
}

async fn take_sample(client: &Client) -> Result<DaemonSample, CliError> {
    Ok(DaemonSample::take_sample(client).await.map_err(anyhow::Error::from)?)
}

/// One screen as text.
fn draw_text(screen: &mut TopScreen, size: [u16; 2]) -> Result<String, CliError> {
    let [columns, lines] = size;
    let mut terminal =
        Terminal::new(TestBackend::new(columns, lines)).map_err(anyhow::Error::from)?;
    terminal.draw(|frame| screen.draw_frame(frame)).map_err(anyhow::Error::from)?;
    let buffer = terminal.backend().buffer();
    let mut text = String::new();
    for line in buffer.content().chunks(usize::from(columns)) {
        let line: String = line.iter().map(|cell| cell.symbol()).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    Ok(text)
}

/// The wish behind a key.
enum KeyWish {
    Leave,
    Stay,
    Close(SequenceId),
}

async fn show_screen<B: Backend<Error: Send + Sync + 'static>>(
    terminal: &mut Terminal<B>,
    client: &Client,
    screen: &mut TopScreen,
    interval: Duration,
) -> Result<(), CliError> {
    let mut looked = Instant::now();
    loop {
        terminal.draw(|frame| screen.draw_frame(frame)).map_err(anyhow::Error::from)?;
        // Keys come to this thread alone, which the runtime can spare.
        if let Some(key) = tokio::task::block_in_place(next_key)? {
            match press_key(screen, key) {
                KeyWish::Leave => return Ok(()),
                KeyWish::Stay => {}
                KeyWish::Close(sequence) => {
                    let answer = client.close_sequence(sequence).await;
                    screen.tell_closed(sequence, answer.err().map(|error| error.to_string()));
                    looked = Instant::now() - interval;
                }
            }
        }
        if looked.elapsed() >= interval {
            looked = Instant::now();
            match DaemonSample::take_sample(client).await {
                Ok(sample) => screen.add_sample(sample),
                // It may come back: the last sample stays, and says how old it is.
                Err(error) => screen.tell_error(error.to_string()),
            }
        }
    }
}

fn next_key() -> Result<Option<KeyCode>, CliError> {
    if !event::poll(KEY_TIME).map_err(anyhow::Error::from)? {
        return Ok(None);
    }
    Ok(match event::read().map_err(anyhow::Error::from)? {
        Event::Key(key) if key.kind == KeyEventKind::Press => {
            let interrupts = key.modifiers.contains(event::KeyModifiers::CONTROL)
                && key.code == KeyCode::Char('c');
            Some(if interrupts { KeyCode::Char('q') } else { key.code })
        }
        _ => None,
    })
}

fn press_key(screen: &mut TopScreen, key: KeyCode) -> KeyWish {
    match key {
        KeyCode::Char('q') | KeyCode::Esc if !screen.is_asking() => return KeyWish::Leave,
        KeyCode::Char('y') => {
            if let Some(sequence) = screen.take_asked() {
                return KeyWish::Close(sequence);
            }
        }
        KeyCode::Char('c') => screen.ask_to_close(),
        KeyCode::Char('s') => screen.next_order(),
        KeyCode::Char('i') => screen.set_order(SequenceOrder::Idle),
        KeyCode::Char('h') => screen.set_order(SequenceOrder::Held),
        KeyCode::Char('t') => screen.set_order(SequenceOrder::Tokens),
        KeyCode::Char('a') => screen.set_order(SequenceOrder::Age),
        KeyCode::Down | KeyCode::Char('j') => screen.move_selection(1),
        KeyCode::Up | KeyCode::Char('k') => screen.move_selection(-1),
        _ => screen.forget_asked(),
    }
    KeyWish::Stay
}

#[cfg(test)]
mod tests;
