//! The screen of `kvd top`: a head, models, sequences, and a line of keys. It only draws what it
//! was given.

use super::super::ask_daemon::{format_bytes, format_time, shorten_text};
use super::sample::{DaemonSample, WorkBytes};
use kvd_client::{SequenceId, SequenceInfo};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Gauge, Paragraph, Row, Table, TableState};
use std::collections::BTreeMap;

/// From this share on a pool is drawn as nearly full, as `KvdPoolNearlyFull` has it.
const NEARLY_FULL: f64 = 0.9;
/// Models that the screen has lines for; sequences get the rest.
const MODEL_LINES_MAX: u16 = 6;

/// How sequences are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SequenceOrder {
    /// Those that nobody has named for longest first.
    Idle,
    /// Those that hold most first.
    Held,
    /// The longest first.
    Tokens,
    /// The oldest first.
    Age,
}

impl SequenceOrder {
    const ALL: [Self; 4] = [Self::Idle, Self::Held, Self::Tokens, Self::Age];

    fn order_name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Held => "held",
            Self::Tokens => "tokens",
            Self::Age => "age",
        }
    }

    fn sort_key(self, sequence: &SequenceInfo) -> u64 {
        match self {
            Self::Idle => sequence.idle_ms,
            Self::Held => held_bytes(sequence),
            Self::Tokens => sequence.length.into(),
            Self::Age => sequence.age_ms,
        }
    }
}

fn held_bytes(sequence: &SequenceInfo) -> u64 {
    sequence.stored.as_ref().map_or(0, |stored| stored.packed_bytes + stored.raw_bytes)
}

/// Everything that is shown.
pub(super) struct TopScreen {
    namespace: String,
    sample: Option<DaemonSample>,
    /// Bytes a second between the last two samples.
    rates: Option<WorkBytes>,
    order: SequenceOrder,
    selected: TableState,
    /// The sequence that is closed if the answer is yes.
    asked: Option<SequenceId>,
    /// The last event, in words.
    told: String,
}

impl TopScreen {
    pub(super) fn new(namespace: String) -> Self {
        Self {
            namespace,
            sample: None,
            rates: None,
            order: SequenceOrder::Idle,
            selected: TableState::default(),
            asked: None,
            told: String::new(),
        }
    }

    /// Takes a newer sample in.
    pub(super) fn add_sample(&mut self, mut sample: DaemonSample) {
        self.rates = self.sample.as_ref().map(|before| rates_between(before, &sample));
        sort_sequences(&mut sample.sequences, self.order);
        let count = sample.sequences.len();
        self.sample = Some(sample);
        if self.selected.selected().is_some_and(|row| row >= count) {
            self.selected.select(count.checked_sub(1));
        }
    }

    pub(super) fn set_order(&mut self, order: SequenceOrder) {
        self.order = order;
        if let Some(sample) = &mut self.sample {
            sort_sequences(&mut sample.sequences, order);
        }
        self.forget_asked();
    }

    pub(super) fn next_order(&mut self) {
        let all = SequenceOrder::ALL;
        let next = all.iter().position(|order| *order == self.order).map_or(0, |at| at + 1);
        self.set_order(all[next % all.len()]);
    }

    pub(super) fn move_selection(&mut self, by: i32) {
        let count = self.sample.as_ref().map_or(0, |sample| sample.sequences.len());
        let now = self.selected.selected();
        let next = match (now, by) {
            (None, _) => 0,
            (Some(row), 1..) => row + 1,
            (Some(row), _) => row.saturating_sub(1),
        };
        self.selected.select((count > 0).then(|| next.min(count - 1)));
        self.forget_asked();
    }

    /// Asks whether the selected sequence is to be closed.
    pub(super) fn ask_to_close(&mut self) {
        let sequences = self.sample.as_ref().map(|sample| &sample.sequences);
        let row = self.selected.selected().and_then(|row| sequences?.get(row));
        match row {
            None => self.told = "select a sequence first, with the arrows".to_owned(),
            Some(sequence) => {
                self.told = format!("close sequence {}? y: yes", sequence.sequence_id);
                self.asked = Some(SequenceId(sequence.sequence_id));
            }
        }
    }

    pub(super) fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    pub(super) fn take_asked(&mut self) -> Option<SequenceId> {
        self.asked.take()
    }

    pub(super) fn forget_asked(&mut self) {
        if self.asked.take().is_some() {
            self.told.clear();
        }
    }

    pub(super) fn tell_closed(&mut self, sequence: SequenceId, error: Option<String>) {
        self.told = error.unwrap_or_else(|| format!("closed sequence {sequence}"));
    }

    pub(super) fn tell_error(&mut self, error: String) {
        self.told = error;
    }

    /// Draws everything.
    pub(super) fn draw_frame(&mut self, frame: &mut Frame<'_>) {
        let Some(sample) = &self.sample else { return };
        let models = (sample.models.len() as u16).clamp(1, MODEL_LINES_MAX) + 1;
        let pools = sample.pools.len().max(1) as u16;
        let areas = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(pools),
            Constraint::Length(2),
            Constraint::Length(models + 1),
            Constraint::Min(3),
            Constraint::Length(1),
        ]);
        let [head, pool, work, models, sequences, keys] = areas.areas(frame.area());
        frame.render_widget(self.head_line(sample), head);
        draw_pools(frame, sample, pool);
        frame.render_widget(Paragraph::new(self.work_lines(sample)), work);
        frame.render_widget(model_table(sample), models);
        let table = sequence_table(sample, self.order);
        frame.render_stateful_widget(table, sequences, &mut self.selected);
        frame.render_widget(self.key_line(), keys);
    }

    fn head_line(&self, sample: &DaemonSample) -> Line<'static> {
        let (state, color) =
            if sample.serving { ("serving", Color::Green) } else { ("not serving", Color::Red) };
        let DaemonSample { version, device, .. } = sample;
        Line::from(vec![
            Span::raw(format!("kvd {version}  ")),
            Span::styled(state, Style::new().fg(color)),
            Span::raw(format!("  {device}  namespace {}", self.namespace)),
        ])
    }

    fn work_lines(&self, sample: &DaemonSample) -> Vec<Line<'static>> {
        let held: u64 = sample.models.iter().map(|model| model.row.held_bytes).sum();
        let saved: u64 = sample.models.iter().map(|model| model.row.saved_bytes()).sum();
        let ratio = if held == 0 { "-".to_owned() } else { ratio_text(held + saved, held) };
        let more = if sample.has_more { "+" } else { "" };
        let saved = format!(
            "saved {} (ratio {ratio})  sessions {}  sequences {}{more}",
            format_bytes(saved),
            sample.sessions.len(),
            sample.sequences.len(),
        );
        let rates = self.rates.map_or_else(
            || "store -  encode -  attend -  load -".to_owned(),
            |rates| {
                let [store, encode, attend, load] =
                    [rates.stored, rates.encoded, rates.attended, rates.loaded].map(rate_text);
                format!("store {store}  encode {encode}  attend {attend}  load {load}")
            },
        );
        vec![Line::from(saved), Line::from(rates)]
    }

    fn key_line(&self) -> Line<'static> {
        let keys = format!("q leave  arrows select  c close  s sort ({})", self.order.order_name());
        if self.told.is_empty() {
            return Line::from(keys).style(Style::new().fg(Color::DarkGray));
        }
        Line::from(self.told.clone()).style(Style::new().fg(Color::Yellow))
    }
}

fn sort_sequences(sequences: &mut [SequenceInfo], order: SequenceOrder) {
    sequences.sort_by_key(|sequence| std::cmp::Reverse(order.sort_key(sequence)));
}

/// Bytes a second. Counts that went back are those of a restart, or of models that are gone.
fn rates_between(before: &DaemonSample, now: &DaemonSample) -> WorkBytes {
    let seconds = now.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
    let (from, to) = (before.count_work(), now.count_work());
    let rate = |from: u64, to: u64| (to.saturating_sub(from) as f64 / seconds) as u64;
    WorkBytes {
        stored: rate(from.stored, to.stored),
        encoded: rate(from.encoded, to.encoded),
        attended: rate(from.attended, to.attended),
        loaded: rate(from.loaded, to.loaded),
    }
}

fn rate_text(bytes: u64) -> String {
    format!("{}/s", format_bytes(bytes))
}

fn ratio_text(logical: u64, held: u64) -> String {
    format!("{:.2}", logical as f64 / held as f64)
}

fn draw_pools(frame: &mut Frame<'_>, sample: &DaemonSample, area: Rect) {
    let lines = Layout::vertical(vec![Constraint::Length(1); sample.pools.len()]).split(area);
    for (pool, line) in sample.pools.iter().zip(lines.iter()) {
        let share = pool.used_bytes as f64 / pool.capacity_bytes.max(1) as f64;
        let [name, bar] =
            Layout::horizontal([Constraint::Length(9), Constraint::Min(10)]).areas(*line);
        frame.render_widget(Line::from(format!("pool {}", pool.device)), name);
        let color = if share >= NEARLY_FULL { Color::Red } else { Color::Blue };
        let label = format!("{:.1} % of {}", share * 100.0, format_bytes(pool.capacity_bytes));
        let gauge = Gauge::default().ratio(share.clamp(0.0, 1.0)).label(label);
        frame.render_widget(gauge.gauge_style(Style::new().fg(color)), bar);
    }
}

fn head_style() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn model_table(sample: &DaemonSample) -> Table<'static> {
    let error = |error: f64| if error > 0.0 { format!("{error:.3}") } else { "-".to_owned() };
    let rows = sample.models.iter().take(MODEL_LINES_MAX.into()).map(|model| {
        let row = &model.row;
        let ratio = match row.held_bytes {
            0 => "-".to_owned(),
            held => ratio_text(held + row.saved_bytes(), held),
        };
        Row::new([
            shorten_text(&row.name, 20),
            shorten_text(&row.codec, 12),
            format!("{:>5}", row.sequences),
            format!("{:>10}", format_bytes(row.held_bytes)),
            format!("{ratio:>6}"),
            format!("{:>6}", row.bits_text()),
            format!("{}/{}", error(model.error[0]), error(model.error[1])),
        ])
    });
    let widths = [20, 12, 5, 10, 6, 6, 11].map(Constraint::Length);
    let head = ["model", "codec", " seqs", "      held", " ratio", "  bits", "err k/v"];
    Table::new(rows, widths).header(Row::new(head).style(head_style()))
}

fn sequence_table(sample: &DaemonSample, order: SequenceOrder) -> Table<'static> {
    let models: BTreeMap<String, &str> =
        sample.models.iter().map(|of| (of.row.model_id.clone(), &of.row.name[..])).collect();
    let sessions: BTreeMap<u64, &str> =
        sample.sessions.iter().map(|of| (of.session_id, &of.name[..])).collect();
    let rows = sample.sequences.iter().map(|sequence| {
        let model = models.get(&sequence.model_id.to_string()).copied().unwrap_or("-");
        let owner = match sequence.session_id {
            0 => "-",
            session => sessions.get(&session).copied().unwrap_or("gone"),
        };
        Row::new([
            sequence.sequence_id.to_string(),
            shorten_text(model, 13),
            shorten_text(owner, 11),
            format!("{:>8}", sequence.length),
            format!("{:>11}", format_bytes(held_bytes(sequence))),
            format!("{:>7}", format_time(sequence.idle_ms)),
            format!("{:>7}", format_time(sequence.age_ms)),
        ])
    });
    let marked = |name: &str, of: SequenceOrder, width: usize| {
        let name = if of == order { format!("{name}*") } else { name.to_owned() };
        format!("{name:>width$}")
    };
    let head = [
        "sequence".to_owned(),
        "model".to_owned(),
        "owner".to_owned(),
        marked("tokens", SequenceOrder::Tokens, 8),
        marked("held", SequenceOrder::Held, 11),
        marked("idle", SequenceOrder::Idle, 7),
        marked("age", SequenceOrder::Age, 7),
    ];
    let widths = [21, 14, 12, 8, 11, 7, 7].map(Constraint::Length);
    Table::new(rows, widths)
        .header(Row::new(head).style(head_style()))
        .column_spacing(0)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
}
