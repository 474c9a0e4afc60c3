//! Precedence, and errors that name the key.

use super::*;

fn load(file: &str, flags: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvd.toml");
    std::fs::write(&path, file).unwrap();
    let flags = flags.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    Config::load(&Overrides { file: Some(path), environment: false, flags })
}

#[test]
fn defaults_are_valid_and_complete() {
    let config = Config::load(&Overrides::default()).unwrap();
    assert_eq!(config.pool_bytes, 1 << 30);
    assert_eq!(config.block_tokens_default, 64);
    assert!(config.namespaces.allow(&Namespace::new("default").unwrap()));
    assert!(!config.namespaces.allow(&Namespace::new("other").unwrap()));
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let file = "[device]\npool_bytes = \"2 MiB\"\nthreads = 3\n";
    let config = load(file, &[("device.pool_bytes", "8 MiB")]).unwrap();
    assert_eq!((config.pool_bytes, config.threads), (8 << 20, 3));
}

#[test]
fn errors_name_the_key() {
    let cases = [
        ("[server]\nlisten_tpc = \"x\"\n", "server"),
        ("[device]\npool_bytes = \"lots\"\n", "device.pool_bytes"),
        ("[device]\npool_bytes = 5\n", "device.pool_bytes"),
        ("[device]\ndevice = \"tpu\"\n", "device.device"),
        ("[limits]\nmodels_max = 0\n", "limits.models_max"),
        ("[limits]\nmodels_max = -1\n", "limits.models_max"),
        ("[server]\nlisten_tcp = \"nowhere\"\n", "server.listen_tcp"),
        ("[server]\nlisten_tcp = \"\"\n", "server.listen_tcp"),
        ("[server]\nstream_window_bytes = \"4 GiB\"\n", "server.stream_window_bytes"),
        ("[server]\nkeepalive_interval_ms = 0\n", "server.keepalive_interval_ms"),
        ("[server]\nkeepalive_timeout_ms = 0\n", "server.keepalive_timeout_ms"),
        ("[server]\nstreams_per_connection_max = 0\n", "server.streams_per_connection_max"),
        ("[server]\nconnections_max = 0\n", "server.connections_max"),
        ("[server]\nconnections_max = 9223372036854775807\n", "server.connections_max"),
        ("[namespaces]\nallowed = [\"a b\"]\n", "namespaces.allowed"),
        ("[namespaces]\nallowed = []\n", "namespaces.allowed"),
        ("[defaults]\nblock_tokens = 0\n", "defaults.block_tokens"),
        ("[log]\nformat = \"xml\"\n", "log.format"),
        ("not toml", ""),
    ];
    for (file, key) in cases {
        let error = load(file, &[]).expect_err(file);
        assert!(error.key.contains(key), "{file:?} answered {error}");
    }
}

#[test]
fn a_star_lets_any_namespace_in() {
    let config = load("[namespaces]\nallowed = [\"*\"]\n", &[]).unwrap();
    assert!(config.namespaces.allow(&Namespace::new("anyone").unwrap()));
}
