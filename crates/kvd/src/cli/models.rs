//! `kvd models`, and models as other commands show them.

use super::CliError;
use super::ask_daemon::{DaemonArgs, format_bytes, json_text, shorten_text};
use super::help;
use super::table::{TableColumn, render_table};
use anyhow::anyhow;
use clap::{Args, Subcommand};
use kvd_client::{Client, ModelDescription, ModelStats};
use kvd_proto::v1;
use serde::Serialize;

/// Columns of a model's name, and of its codec's.
const NAME_COLUMNS: usize = 20;
const CODEC_COLUMNS: usize = 14;

#[derive(Subcommand)]
pub(super) enum ModelsCommand {
    /// List models: their codec, sequences, and bytes.
    #[command(after_help = help::MODELS)]
    List(ModelListArgs),
}

#[derive(Args)]
pub(super) struct ModelListArgs {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One model of a list. The id is a text: it does not fit the numbers of every reader of JSON.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ModelRow {
    pub(super) model_id: String,
    pub(super) name: String,
    pub(super) codec: String,
    pub(super) sequences: u64,
    pub(super) held_bytes: u64,
    /// Values held, in packed blocks, windows and open blocks.
    values: u64,
    /// Calibration and tables, held once.
    once_bytes: u64,
    /// Mean bits of a packed value, everything counted; absent while nothing is packed.
    bits_per_value: Option<f64>,
    fallback_pages: u64,
    /// Bytes of the same values in the stored precision; absent where the precision is unknown.
    logical_bytes: Option<u64>,
}

impl From<ModelStats> for ModelRow {
    fn from(stats: ModelStats) -> Self {
        let stored = stats.stored.unwrap_or_default();
        let packed = stored.packed_values as f64;
        Self {
            model_id: stats.model_id.to_string(),
            name: stats.name,
            codec: stats.codec,
            sequences: stats.sequences,
            held_bytes: stored.packed_bytes + stored.raw_bytes,
            values: stored.packed_values + stored.raw_values,
            once_bytes: stats.calibration_bytes + stats.table_bytes,
            bits_per_value: (packed > 0.0).then(|| 8.0 * stored.packed_bytes as f64 / packed),
            fallback_pages: stats.fallback_pages,
            logical_bytes: None,
        }
    }
}

impl ModelRow {
    /// A model with its geometry, which says how many bytes a value has.
    pub(super) fn of_description(model: &ModelDescription) -> Option<Self> {
        let row = Self::from(model.model.clone()?);
        let value_bytes = match model.geometry.as_ref()?.dtype() {
            v1::DType::DtypeF32 => 4,
            v1::DType::DtypeF16 | v1::DType::DtypeBf16 => 2,
            v1::DType::DtypeUnspecified => return None,
        };
        Some(Self { logical_bytes: Some(row.values * value_bytes), ..row })
    }

    /// Bits of a packed value, for people.
    pub(super) fn bits_text(&self) -> String {
        self.bits_per_value.map_or_else(|| "-".to_owned(), |bits| format!("{bits:.2}"))
    }

    /// Bytes that compression saves now; none while windows reserve more than they hold.
    pub(super) fn saved_bytes(&self) -> u64 {
        self.logical_bytes.unwrap_or_default().saturating_sub(self.held_bytes)
    }
}

/// Runs the command; what it prints.
pub(super) async fn run_command(command: ModelsCommand) -> Result<String, CliError> {
    let ModelsCommand::List(args) = command;
    let client = args.daemon.connect_client().await?;
    let rows = list_rows(&client).await.map_err(anyhow::Error::from)?;
    if args.json { json_text(&rows) } else { Ok(model_table(&rows)) }
}

/// The models of the client's namespace.
pub(super) async fn list_rows(client: &Client) -> Result<Vec<ModelRow>, kvd_client::ClientError> {
    let models = client.list_models().await?;
    Ok(sort_rows(models.iter().filter_map(ModelRow::of_description).collect()))
}

/// By name: ids are drawn.
fn sort_rows(mut rows: Vec<ModelRow>) -> Vec<ModelRow> {
    rows.sort_by(|a, b| (&a.name, &a.model_id).cmp(&(&b.name, &b.model_id)));
    rows
}

/// A model by its name or id.
pub(super) async fn find_description(
    client: &Client,
    model: &str,
) -> Result<ModelDescription, CliError> {
    let models = client.list_models().await.map_err(anyhow::Error::from)?;
    let is_named = |stats: &ModelStats| stats.name == model;
    let has_id = |stats: &ModelStats| stats.model_id.to_string() == model;
    let find = |is_it: &dyn Fn(&ModelStats) -> bool| {
        models.iter().find(|of| of.model.as_ref().is_some_and(is_it)).cloned()
    };
    let found = find(&is_named).or_else(|| find(&has_id));
    Ok(found.ok_or_else(|| anyhow!("no model {model:?} in this namespace; see kvd models list"))?)
}

/// Models as a table.
pub(super) fn model_table(rows: &[ModelRow]) -> String {
    if rows.is_empty() {
        return "no models\n".to_owned();
    }
    let cells = |cell: fn(&ModelRow) -> String| rows.iter().map(cell).collect::<Vec<_>>();
    let ratio = |row: &ModelRow| match (row.logical_bytes, row.held_bytes) {
        (Some(logical), 1..) => format!("{:.2}", logical as f64 / row.held_bytes as f64),
        _ => "-".to_owned(),
    };
    render_table(&[
        TableColumn::of_text("model", cells(|row| row.model_id.clone())),
        TableColumn::of_text("name", cells(|row| shorten_text(&row.name, NAME_COLUMNS))),
        TableColumn::of_text("codec", cells(|row| shorten_text(&row.codec, CODEC_COLUMNS))),
        TableColumn::of_numbers("seqs", cells(|row| row.sequences.to_string())),
        TableColumn::of_numbers("held", cells(|row| format_bytes(row.held_bytes))),
        TableColumn::of_numbers("ratio", cells(ratio)),
        TableColumn::of_numbers("bits", cells(ModelRow::bits_text)),
    ])
}

#[cfg(test)]
mod tests {
    use super::super::table::{COLUMNS, columns_of};
    use super::*;
    use kvd_client::StoredBytes;

    #[test]
    fn models_are_listed_by_name() {
        let row = |model_id, name: &str| {
            let stored = Some(StoredBytes::default());
            ModelRow::from(ModelStats {
                model_id,
                name: name.to_owned(),
                stored,
                ..Default::default()
            })
        };
        let rows = sort_rows(vec![row(1, "b"), row(3, "a"), row(2, "c")]);
        assert_eq!(rows.iter().map(|row| &row.name[..]).collect::<Vec<_>>(), ["a", "b", "c"]);
    }

    #[test]
    fn the_widest_list_fits_a_terminal_and_says_what_is_saved() {
        let stored = StoredBytes {
            packed_values: 1 << 40,
            packed_bytes: 1 << 39,
            raw_values: 1 << 20,
            raw_bytes: 2 << 20,
            ..Default::default()
        };
        let stats = ModelStats {
            model_id: u64::MAX,
            name: "meta-llama/Llama-3.1-8B-Instruct".to_owned(),
            codec: "custom-0123456789abcdef".to_owned(),
            sequences: 1 << 20,
            stored: Some(stored),
            ..Default::default()
        };
        let geometry = v1::Geometry { dtype: v1::DType::DtypeF16.into(), ..Default::default() };
        let described =
            ModelDescription { model: Some(stats), geometry: Some(geometry), ..Default::default() };
        let row = ModelRow::of_description(&described).unwrap();
        assert_eq!(row.saved_bytes(), (1 << 41) - (1 << 39));
        let text = model_table(&[row]);
        assert!(columns_of(&text) <= COLUMNS, "{} columns:\n{text}", columns_of(&text));
        assert!(text.contains("  4.00  4.00\n"), "{text}");
        assert_eq!(model_table(&[]), "no models\n");
    }
}
