//! Precedence, and errors that name the key.

use super::*;
use std::path::Path;

fn load(file: &str, flags: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvd.toml");
    std::fs::write(&path, file).unwrap();
    let flags = flags.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    Config::load(&ConfigOverrides { file: Some(path), environment: false, flags })
}

#[test]
fn defaults_are_valid_and_complete() {
    let config = Config::load(&ConfigOverrides::default()).unwrap();
    assert_eq!(config.pool_bytes, 1 << 30);
    assert_eq!(config.block_tokens_default, 64);
    assert!(config.namespaces.allow_namespace(&Namespace::new("default").unwrap()));
    assert!(!config.namespaces.allow_namespace(&Namespace::new("other").unwrap()));
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let file = "[device]\npool_bytes = \"2 MiB\"\nthreads = 3\n";
    let config = load(file, &[("device.pool_bytes", "8 MiB")]).unwrap();
    assert_eq!((config.pool_bytes, config.threads), (8 << 20, 3));
}

#[test]
fn compiled_kernels_are_kept_where_the_system_keeps_caches_or_where_it_is_said() {
    let of = |text, home: &'static str, caches: &'static str| {
        let variable = |name: &str| match name {
            "HOME" => Some(home.into()),
            _ => Some(caches.into()),
        };
        kernel_cache(text, variable)
    };
    let folder = |path: &str| KernelCache::Folder(path.into());
    assert_eq!(of("off", "/home/k", ""), KernelCache::Off);
    assert_eq!(of("/var/k", "/home/k", "/c"), folder("/var/k"));
    assert_eq!(of("", "/home/k", "/c"), folder("/c/kvd/kernels"));
    assert_eq!(of("", "/home/k", "not/absolute"), folder("/home/k/.cache/kvd/kernels"));
    assert_eq!(of("", "", ""), KernelCache::Nowhere);
}

#[test]
fn a_device_is_the_processor_or_a_gpu_by_number_or_uuid() {
    let devices = |text: &str| load("", &[("device.device", text)]).unwrap().devices;
    let device = |text: &str| devices(text).remove(0);
    assert_eq!(Config::load(&ConfigOverrides::default()).unwrap().devices, [DeviceChoice::Cpu]);
    let two = [DeviceChoice::Cuda(GpuName::Ordinal(0)), DeviceChoice::Cuda(GpuName::Ordinal(1))];
    assert_eq!(devices("cuda:0, cuda:1"), two);
    assert_eq!(devices("cpu,cpu").len(), 2);
    assert_eq!(device("auto"), DeviceChoice::Auto);
    assert_eq!(device("cuda:3"), DeviceChoice::Cuda(GpuName::Ordinal(3)));
    let uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f";
    let by_uuid = DeviceChoice::Cuda(GpuName::Uuid(uuid.to_owned()));
    assert_eq!(device(&format!("cuda:{}", uuid.to_uppercase())), by_uuid);
    let instance = uuid.replace("GPU", "MIG");
    let by_instance = DeviceChoice::Cuda(GpuName::Uuid(instance.clone()));
    assert_eq!(device(&format!("cuda:{instance}")), by_instance);
}

#[test]
fn errors_name_the_key() {
    let cases = [
        ("[server]\nlisten_tpc = \"x\"\n", "server.listen_tpc"),
        ("[sever]\nlisten_tcp = \"x\"\n", "sever.listen_tcp"),
        ("pool_bytes = \"1 GiB\"\n", "pool_bytes"),
        ("[device]\npool_bytes = \"lots\"\n", "device.pool_bytes"),
        ("[device]\npool_bytes = 5\n", "device.pool_bytes"),
        ("[device]\ndevice = \"tpu\"\n", "device.device"),
        ("[device]\ndevice = \"cuda\"\n", "device.device"),
        ("[device]\ndevice = \"cuda:-1\"\n", "device.device"),
        ("[device]\ndevice = \"cuda:GPU-12\"\n", "device.device"),
        ("[device]\ndevice = \"cpu,\"\n", "device.device"),
        ("[device]\ndevice = \"cuda:1,cuda:0,cuda:1\"\n", "device.device"),
        ("[device]\ndevice = \"cpu, auto\"\n", "device.device"),
        ("[device]\nprecision = \"half\"\n", "device.precision"),
        ("[device]\nkernel_timeout_ms = 0\n", "device.kernel_timeout_ms"),
        ("[limits]\nmodels_max = 0\n", "limits.models_max"),
        ("[limits]\nsessions_max = 0\n", "limits.sessions_max"),
        ("[limits]\nsession_ttl_ms_max = -1\n", "limits.session_ttl_ms_max"),
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
        ("[device]\nthreads = 1025\n", "device.threads"),
        ("[device]\nqueue_jobs_max = 65537\n", "device.queue_jobs_max"),
        ("[limits]\ncalibration_bytes_max = \"65 MiB\"\n", "limits.calibration_bytes_max"),
        ("[limits]\ninflight_bytes_max = \"128 MiB\"\n", "limits.inflight_bytes_max"),
        ("[limits]\nattend_parts_max = 0\n", "limits.attend_parts_max"),
        ("[limits]\nattend_work_max = 0\n", "limits.attend_work_max"),
        ("[limits]\nstep_rows_max = 0\n", "limits.step_rows_max"),
        ("[limits]\nsequence_layers_max = 0\n", "limits.sequence_layers_max"),
        ("[limits]\nsequence_views_max = 0\n", "limits.sequence_views_max"),
    ];
    for (file, key) in cases {
        let error = load(file, &[]).expect_err(file);
        assert_eq!(error.key, key, "{file:?} answered {error}");
    }
    let error = load("", &[("server.listen_tpc", "x")]).unwrap_err();
    assert_eq!(error.key, "server.listen_tpc");
    let error = load("not toml", &[]).unwrap_err();
    assert!(error.key.ends_with("kvd.toml"), "{error}");
}

#[test]
fn a_value_of_the_wrong_type_names_the_file_that_has_it() {
    for file in ["[device]\nprecision = 3\n", "[device]\npool_bytes = 3.5\n"] {
        let error = load(file, &[("device.graphs_max", "3")]).unwrap_err();
        assert!(error.key.starts_with("device.p"), "{error}");
        assert!(error.reason.ends_with("kvd.toml"), "{error}");
    }
    let error = load("[device]\nthreads = 3\n", &[("device.threads", "x")]).unwrap_err();
    assert!(error.key == "device.threads" && !error.reason.contains("toml"), "{error}");
}

#[test]
fn sizes_that_belong_together_may_grow_together() {
    let file = "[server]\nmessage_bytes_max = \"256 MiB\"\n\
                [limits]\ncalibration_bytes_max = \"256 MiB\"\n";
    assert_eq!(load(file, &[]).unwrap().calibration_bytes_max, 256 << 20);
}

/// Prints what [`with_environment`] asks about; by itself it tests nothing.
#[test]
#[ignore = "run by the tests of the environment, in a process of their own"]
fn environment_probe() {
    let overrides = ConfigOverrides { environment: true, ..ConfigOverrides::default() };
    let answer = match Config::load(&overrides) {
        Ok(config) => format!("threads {}", config.threads),
        Err(error) => error.to_string(),
    };
    std::fs::write(std::env::var("PROBE_ANSWER").unwrap(), answer).unwrap();
}

/// Loads a configuration under some variables. A process has one environment, which tests that run
/// beside one another must not change.
fn with_environment(variables: &[(&str, impl AsRef<std::ffi::OsStr>)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let answer = dir.path().join("answer");
    let mut probe = std::process::Command::new(std::env::current_exe().unwrap());
    probe.args(["--exact", "--ignored", "config::tests::environment_probe"]);
    probe.env("PROBE_ANSWER", &answer).envs(variables.iter().map(|(name, value)| (name, value)));
    assert!(probe.output().unwrap().status.success());
    std::fs::read_to_string(answer).unwrap()
}

#[test]
fn only_variables_with_two_underscores_are_settings() {
    let others = [
        ("KVD_CONFIG", "/etc/kvd/kvd.toml"),
        ("KVD_PORT", "tcp://10.0.0.1:7070"),
        ("KVD_SERVICE_HOST", "10.0.0.1"),
        ("KVD_PORT_7070_TCP_ADDR", "10.0.0.1"),
        ("KVD_DEVICE__THREADS", "5"),
    ];
    assert_eq!(with_environment(&others), "threads 5");
}

#[test]
fn errors_name_the_variable() {
    let answer = with_environment(&[("KVD_SERVER__LISTEN_TPC", "x")]);
    let key = "configuration: environment KVD_SERVER__LISTEN_TPC: no such setting";
    assert!(answer.starts_with(key), "{answer}");
    assert!(answer.contains("is server.listen_tcp meant?"), "{answer}");
    let answer = with_environment(&[("KVD_DEVICE__FOOBAR", "x")]);
    assert!(answer.contains("no such setting") && !answer.contains("meant"), "{answer}");
    let answer = with_environment(&[("KVD_DEVICE__THREADS", "many")]);
    assert!(answer.starts_with("configuration: environment KVD_DEVICE__THREADS: "), "{answer}");
}

#[test]
fn variables_that_nothing_would_read_are_refused() {
    use std::os::unix::ffi::OsStrExt;
    let broken = std::ffi::OsStr::from_bytes(b"\xff4");
    let one = std::ffi::OsStr::new("1");
    for (name, value) in [
        ("KVD_DEVICE__", one),
        ("KVD__THREADS", one),
        ("KVD_DEVICE____THREADS", one),
        ("KVD_DEVICE__THREADS_", one),
        ("KVD_DEVICE__THREADS", broken),
    ] {
        let answer = with_environment(&[(name, value)]);
        assert!(answer.starts_with(&format!("configuration: environment {name}: ")), "{answer}");
    }
}

#[test]
fn a_setting_with_one_underscore_is_told_to_have_two() {
    for (name, right) in [
        ("KVD_SERVER_LISTEN_TCP", "KVD_SERVER__LISTEN_TCP"),
        ("KVD_DEVICE_POOL_BYTES", "KVD_DEVICE__POOL_BYTES"),
        ("KVD_CACHE_DISK_PATH", "KVD_CACHE__DISK__PATH"),
    ] {
        let answer = with_environment(&[(name, "x")]);
        assert!(answer.contains(name) && answer.contains(right), "{answer}");
    }
}

#[test]
fn one_path_is_not_two_sockets() {
    let both = "[server]\nlisten_unix = \"/run/kvd/a\"\nlisten_region = \"/run/kvd/./a\"\n";
    let error = load(both, &[]).unwrap_err().to_string();
    assert!(error.contains("server.listen_region") && error.contains("same path"), "{error}");
    let long = format!("[server]\nlisten_unix = \"/run/{}\"\n", "a".repeat(103));
    let error = load(&long, &[]).unwrap_err().to_string();
    assert!(error.contains("108 bytes") && error.contains("at most 107"), "{error}");
}

#[test]
fn a_star_lets_any_namespace_in() {
    let config = load("[namespaces]\nallowed = [\"*\"]\n", &[]).unwrap();
    assert!(config.namespaces.allow_namespace(&Namespace::new("anyone").unwrap()));
}

#[test]
fn settings_in_deployments_are_known_and_hold_good_values() {
    let read = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(name);
        std::fs::read_to_string(path).unwrap()
    };
    let files = ["compose.yaml", "compose.gpu.yaml", "k8s/daemonset.yaml", "k8s/gpu-patch.yaml"];
    let mut found = 0;
    for name in files {
        let mut settings: Vec<(String, String)> = Vec::new();
        for line in read(name).lines().filter(|line| !line.trim_start().starts_with('#')) {
            let Some((_, setting)) = line.split_once("KVD_") else { continue };
            let (key, value) = setting.split_once([',', ':']).unwrap();
            let value = value.trim_start_matches([' ', ',']).trim_start_matches("value: ");
            let value = value.trim_matches([' ', '}', '"']);
            let (section, key) = key.split_once("__").unwrap();
            let key = format!("{section}.{key}").to_lowercase();
            settings.push((key, value.to_owned()));
        }
        // Together: some need each other.
        let flags: Vec<_> = settings.iter().map(|(key, value)| (&key[..], &value[..])).collect();
        load("", &flags).unwrap_or_else(|error| panic!("{name}: {error}"));
        found += settings.len();
    }
    assert_eq!(found, 8);
    let daemon_set = read("k8s/daemonset.yaml");
    let (_, file) = daemon_set.split_once("  kvd.toml: |\n").unwrap();
    load(file.split_once("\n---").unwrap().0, &[]).unwrap();
    let image = read("Dockerfile");
    assert!(read("compose.gpu.yaml").contains("target: gpu") && image.contains(" AS gpu\n"));
}

/// Another value of a setting than its default, of the same kind.
fn other(value: &toml::Value) -> toml::Value {
    match value {
        toml::Value::String(text) if text.parse::<SizeSetting>().is_ok() => "12345 B".into(),
        toml::Value::String(_) => "a \"b\" \\ c # = 'ü'\tx".into(),
        toml::Value::Integer(count) => (count + 1).into(),
        toml::Value::Float(share) => (1.0 - share).into(),
        toml::Value::Boolean(flag) => (!flag).into(),
        toml::Value::Array(_) => toml::Value::Array(vec!["a".into(), "b \"#\" c".into()]),
        toml::Value::Table(inside) => {
            toml::Value::Table(inside.iter().map(|(key, of)| (key.clone(), other(of))).collect())
        }
        other => panic!("{other} is no kind of setting"),
    }
}

/// Settings in a value: those inside a section, or itself.
fn count_keys(value: &toml::Value) -> usize {
    value.as_table().map_or(1, |inside| inside.values().map(count_keys).sum())
}

#[test]
fn every_key_that_is_printed_is_read_back() {
    let read = |text: &str| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvd.toml");
        std::fs::write(&path, text).unwrap();
        RawConfig::load(&ConfigOverrides { file: Some(path), ..ConfigOverrides::default() })
            .unwrap()
    };
    let defaults = read("");
    assert_eq!(read(&defaults.to_toml()), defaults);
    let mut table: toml::Table = DEFAULT_TOML.parse().unwrap();
    let mut keys = 0;
    for (_, section) in &mut table {
        for (_, value) in section.as_table_mut().unwrap() {
            *value = other(value);
            keys += count_keys(value);
        }
    }
    let changed = read(&toml::to_string(&table).unwrap());
    let printed = changed.to_toml();
    assert_eq!(read(&printed), changed, "{printed}");
    assert_eq!(printed.matches("  # default: ").count(), keys, "{printed}");
    assert!(printed.contains("pool_bytes = \"12345 B\"  # default: \"1 GiB\""), "{printed}");
}

#[test]
fn a_level_of_the_log_or_a_size_that_is_none_is_refused_with_what_there_is() {
    for (key, value, part) in [
        ("log.filter", "verbose", "no level"),
        ("device.pool_bytes", "lots", "a size such as 4 GiB"),
        ("device.pool_bytes", "true", "a size such as 4 GiB"),
        ("device.pool_bytes", "-5", "a size such as 4 GiB"),
        ("server.message_bytes_max", "[1]", "a size such as 4 GiB"),
        ("server.message_bytes_max", "4 GiB", "above the maximum 4294967295"),
        ("admin.listen", "nowhere", "nowhere:7070"),
        ("device.threads", "many", "a whole number"),
        ("limits.models_max", "-1", "a whole number"),
        ("server.streams_per_connection_max", "4294967296", "a whole number"),
        ("device.prefault", "maybe", "true or false"),
        ("namespaces.allowed", "default", "a list such as [\"default\"]"),
        ("namespaces.weights", "a=4", "a list such as [\"interactive=4\"]"),
        ("namespaces.quotas", "a: models=4", "a list such as [\"team-a: pool_bytes=2 GiB\"]"),
    ] {
        let error = load("", &[(key, value)]).expect_err(value);
        assert_eq!(error.key, key, "{error}");
        assert!(error.reason.contains(part), "{error}");
    }
    let config = load("", &[("server.listen_tcp", "localhost:7171")]).unwrap();
    assert!(config.listen_tcp.unwrap().ip().is_loopback());
}

#[test]
fn weights_are_names_and_numbers() {
    let weights = |text: &str| load("", &[("namespaces.weights", text)]);
    assert!(Config::load(&ConfigOverrides::default()).unwrap().weights.is_empty());
    let two = weights("[\"interactive=4\", \"batch = 1\"]").unwrap().weights;
    let of = |name| two[&Namespace::new(name).unwrap()];
    assert_eq!((of("interactive"), of("batch"), two.len()), (4, 1, 2));
    for wrong in ["a", "a=0", "a=1001", "a=x", "=2", "a b=2"] {
        let error = weights(&format!("[\"{wrong}\"]")).unwrap_err();
        assert_eq!(error.key, "namespaces.weights", "{wrong}");
    }
    let error = weights("[\"a=1\", \"a=2\"]").unwrap_err();
    assert!(error.reason.contains("again"), "{error}");
}

#[test]
fn a_connection_may_send_the_largest_request() {
    let error = load("", &[("limits.connection_bytes_max", "200 MiB")]).unwrap_err();
    assert_eq!(error.key, "limits.connection_bytes_max");
    assert!(error.reason.contains("server.message_bytes_max"), "{error}");
    let bytes = |flags: &[(&str, &str)]| load("", flags).unwrap().connection_bytes_max;
    let large = ("server.message_bytes_max", "128 MiB");
    assert_eq!(bytes(&[large, ("limits.connection_bytes_max", "1 GiB")]), 1 << 30);
    // By itself a quarter of all, or as much as a request takes.
    assert_eq!(bytes(&[]), 256 << 20);
    assert_eq!(bytes(&[large]), (2 * 128 + 128) << 20);
    assert_eq!(bytes(&[("limits.inflight_bytes_max", "4 GiB")]), 1 << 30);
    let bytes = |flags: &[(&str, &str)]| load("", flags).unwrap().namespace_bytes_max;
    assert_eq!(bytes(&[]), 896 << 20, "seven eighths of all");
    let error = load("", &[("limits.namespace_bytes_max", "200 MiB")]).unwrap_err();
    assert_eq!(error.key, "limits.namespace_bytes_max");
}
