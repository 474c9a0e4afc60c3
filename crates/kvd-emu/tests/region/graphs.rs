//! Launches that repeat, as graphs: the same answers as kernel by kernel, what a decode step costs,
//! what a driver refuses, and that nothing of them stays.

use super::*;
use kvd_compute::EncodeSource;
use std::collections::BTreeMap;

/// The backend without graphs.
fn without_graphs(text: &str) -> (Fixture, PlanPart) {
    with_rows(text, CudaOptions { graphs: 0, ..OPTIONS })
}

/// Attends in the fixture's region, without what its suite does around it.
fn ask(fixture: &mut Fixture, plan: &AttendPlan) -> Result<(), ErrorCode> {
    let (places, _) = fixture.backend.plan_places(plan);
    let backend = &mut fixture.backend.backend;
    let asked = backend.attend_in_place(plan, &places, &mut || {});
    asked.map(|_| ()).map_err(|error| error.code())
}

#[test]
fn launches_that_repeat_become_a_graph_that_follows_what_changes() {
    if !is_available() {
        return;
    }
    let (mut plain, other_part) = without_graphs("raw");
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    // Sequences, and after each call: kernels launched one by one, graphs. There are four kernels:
    // queries, attention, merge and answer.
    let rounds: [(&[u32], u64, u64); 9] = [
        (&[1, 1], 4, 0),
        (&[1, 1], 4, 1),
        (&[1, 1], 4, 2),
        // Everything is another: to change the graph pays when it is asked again.
        (&[1], 8, 2),
        (&[1], 8, 3),
        (&[1], 8, 4),
        // One call of others in between leaves the graph as it is.
        (&[1, 1, 1], 12, 4),
        (&[1], 12, 5),
        // Another soft cap is one node's.
        (&[1], 12, 6),
    ];
    let mut updated = 0;
    for (round, (n_q, kernels, graphs)) in rounds.into_iter().enumerate() {
        let of = |part: &PlanPart| {
            let mut plan = plan(part, DType::F16, 4, n_q);
            plan.soft_cap = (round == 8).then_some(2.0);
            plan
        };
        let right = plain.backend.attend(&of(&other_part)).unwrap();
        let answer = fixture.backend.attend(&of(&part)).unwrap();
        assert_eq!((answer.out, answer.lse), (right.out, right.lse), "round {round}");
        let launches = fixture.backend.backend.launches();
        let counted = (launches.kernels, launches.graphs);
        assert_eq!(counted, (kernels, graphs), "round {round}: {launches:?}");
        let changed = launches.nodes_updated > updated;
        assert_eq!(changed, [4, 8].contains(&round), "round {round}: {launches:?}");
        updated = launches.nodes_updated;
    }
    let launches = fixture.backend.backend.launches();
    assert_eq!((launches.graphs_built, launches.graphs_off), (1, None));
    let launches = plain.backend.backend.launches();
    assert_eq!((launches.kernels, launches.graphs), (9 * 4, 0));
}

/// Asks a plan's own queries, and says how often kernels were launched, graphs made, changed and
/// launched for it.
fn asked(fixture: &mut Fixture, plan: &AttendPlan) -> [usize; 4] {
    let (places, _) = fixture.backend.plan_places(plan);
    fixture.backend.backend.write_region(places.region, places.q, &plan.q).unwrap();
    let calls = |fixture: &Fixture| {
        let watch = fixture.watch.lock();
        ["launch", "build_graph", "update_graph", "launch_graph"]
            .map(|call| watch.calls.get(call).copied().unwrap_or(0))
    };
    let before = calls(fixture);
    ask(fixture, plan).unwrap();
    let after = calls(fixture);
    std::array::from_fn(|i| after[i] - before[i])
}

#[test]
fn callers_that_take_turns_take_no_more_calls_than_kernels() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let sizes: [&[u32]; 2] = [&[1, 1], &[1, 1, 1, 1]];
    let plans = sizes.map(|n_q| plan(&part, DType::F16, 4, n_q));
    let mut graphs = 0;
    for round in 0..8 {
        for plan in &plans {
            let calls = asked(&mut fixture, plan);
            assert!(calls.iter().sum::<usize>() <= 4, "round {round}: {calls:?}");
            graphs += calls[3];
        }
    }
    // The graph is one caller's.
    assert_eq!(graphs, 8);
    // A size that stays has it from its second call on, whichever has it now.
    for plan in plans.iter().chain(&plans) {
        let calls = [(); 4].map(|()| asked(&mut fixture, plan));
        assert_eq!(calls[0][0] + calls[0][2], 4, "{calls:?}");
        assert_eq!((calls[1][0], calls[1][3]), (0, 1), "{calls:?}");
        assert_eq!(calls[2..], [[0, 0, 0, 1]; 2]);
    }
    assert_eq!(fixture.backend.backend.launches().graphs_built, 1);
}

#[test]
fn one_sequence_more_than_there_is_room_for_leaves_the_others_their_graphs() {
    if !is_available() {
        return;
    }
    let mut fixture =
        open(ThreadOrder::Random(3), Pace::Late, CudaOptions { graphs: 2, ..OPTIONS });
    let geometry = Geometry { layers: 3, ..geometry() };
    let part = write_rows(&mut fixture.backend.backend, "raw", &geometry);
    fixture.backend.head_dims = [96, 64];
    let plan = plan(&part, DType::F16, 4, &[1]);
    // A region's answers are in one place: all layers are asked for the same.
    fixture.backend.attend(&plan).unwrap();
    let layers = [0, 1, 2].map(|layer| AttendPlan { layer: LayerIndex(layer), ..plan.clone() });
    for round in 0..8 {
        let calls = layers.each_ref().map(|plan| asked(&mut fixture, plan)[3]);
        // The first layer was asked before.
        assert_eq!(calls, [1, usize::from(round > 0), 0], "round {round}");
    }
    // The third has the place of the first when that was not asked for as long as eight calls.
    let live = fixture.watch.lock().live;
    let calls: [usize; 10] =
        [(); 10].map(|()| layers[1..].iter().map(|plan| asked(&mut fixture, plan)[3]).sum());
    assert_eq!(calls, [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    assert_eq!(fixture.watch.lock().live, live);
    assert_eq!(asked(&mut fixture, &layers[0]), [4, 0, 0, 0]);
}

/// Encodes 64 rows behind the raw ones: a part of pages for the first tokens.
fn pages(backend: &mut CudaBackend) -> PlanPart {
    let geometry = geometry();
    let extent = Extent { offset: 262_144, len: geometry.raw_layout(64).size_bytes() };
    let bytes = |dim: u32, step: f32| -> bytes::Bytes {
        let values: Vec<f32> = (0..64 * 2 * dim).map(|i| (i as f32 * step).cos()).collect();
        let mut bytes = vec![0; values.len() * geometry.dtype.size_bytes()];
        geometry.dtype.narrow_values(&values, &mut bytes);
        bytes.into()
    };
    let rows = IncomingRows { tokens: 64, k: bytes(96, 0.31), v: bytes(64, 0.57) };
    let to = RawTarget { extent, capacity_rows: 64, first_row: 0 };
    backend.write(ModelId(1), &rows, 0, 64, to).unwrap();
    let source = EncodeSource { extent, capacity_rows: 64, first_row: 0, rows: 64 };
    let encoded = backend.encode(ModelId(1), LayerIndex(0), &[source]).unwrap().remove(0).unwrap();
    let slot = Extent { offset: 524_288, len: encoded.size_bytes() };
    backend.move_pages(&encoded, slot);
    let source = Source::Pages { extent: slot, ends: encoded.page_ends, first_row: 0 };
    PlanPart { first_token: 0, rows: 64, source }
}

/// A decode step of two sequences, each of a block of pages and so many raw rows.
fn step(parts: &[PlanPart; 2], rows: u32) -> AttendPlan {
    let [pages, raw] = parts.clone();
    let mut plan = plan(&raw, DType::F16, 4, &[1, 1]);
    for query in &mut plan.queries {
        query.parts = [pages.clone(), PlanPart { first_token: 64, rows, ..raw.clone() }].into();
        query.position = 64 + rows;
    }
    plan
}

#[test]
fn a_decode_step_changes_no_node_and_calls_the_driver_less() {
    if !is_available() {
        return;
    }
    let mut calls = Vec::new();
    let mut answers = Vec::new();
    for graphs in [0, 4] {
        let (mut fixture, raw) = with_rows("kivi-4", CudaOptions { graphs, ..OPTIONS });
        let parts = [pages(&mut fixture.backend.backend), raw];
        let mut of_last = BTreeMap::new();
        for rows in 20..=26 {
            let plan = step(&parts, rows);
            let answer = fixture.backend.attend(&plan).unwrap();
            answers.push((graphs, rows, answer.out, answer.lse));
            let before = fixture.watch.lock().calls.clone();
            ask(&mut fixture, &plan).unwrap();
            of_last = fixture.watch.lock().calls.clone();
            for (call, count) in before {
                *of_last.get_mut(call).unwrap() -= count;
            }
            of_last.retain(|_, count| *count > 0);
        }
        let launches = fixture.backend.backend.launches();
        assert_eq!(launches.nodes_updated, 0, "{launches:?}");
        println!("graphs_max = {graphs}: {of_last:?}");
        calls.push(of_last);
    }
    let (plain, graphs) = answers.split_at(answers.len() / 2);
    for (plain, graphs) in plain.iter().zip(graphs) {
        assert_eq!((plain.1, &plain.2, &plain.3), (graphs.1, &graphs.2, &graphs.3));
    }
    let around = [("is_done", 1), ("read", 1), ("record", 3), ("wait", 1), ("write", 1)];
    let with = |launch| around.into_iter().chain([launch]).collect::<BTreeMap<_, usize>>();
    // Queries, attention over pages and over raw rows, merge and answer.
    assert_eq!(calls, [with(("launch", 5)), with(("launch_graph", 1))]);
}

#[test]
fn a_graph_that_the_driver_refuses_turns_graphs_off_and_the_answer_stands() {
    if !is_available() {
        return;
    }
    for (fail, wanted) in [(Fail::Graphs, "build_graph"), (Fail::Updates, "update_graph")] {
        let (mut plain, other_part) = without_graphs("raw");
        let (mut fixture, part) = with_rows("raw", OPTIONS);
        fixture.watch.lock().fail = fail;
        for n_q in [&[1][..], &[1], &[1, 1], &[1, 1], &[1]] {
            let right = plain.backend.attend(&plan(&other_part, DType::F32, 2, n_q)).unwrap();
            let answer = fixture.backend.attend(&plan(&part, DType::F32, 2, n_q)).unwrap();
            assert_eq!((answer.out, answer.lse), (right.out, right.lse), "{fail:?}");
        }
        let launches = fixture.backend.backend.launches();
        let off = launches.graphs_off.unwrap();
        assert!(off.contains(wanted), "{off}");
        assert_eq!(launches.graphs, u64::from(fail == Fail::Updates));
        // It was refused once, and not asked for again.
        assert_eq!(fixture.watch.lock().calls[wanted], 1);
        assert_eq!(fixture.backend.failure(), None);
        let Fixture { backend, watch, .. } = fixture;
        drop(backend);
        assert_eq!(watch.lock().live, 0);
    }
}

#[test]
fn a_graph_that_was_changed_in_part_is_given_back() {
    if !is_available() {
        return;
    }
    let (mut plain, other_part) = without_graphs("raw");
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let of = |part: &PlanPart, changed: bool| {
        let mut plan = plan(part, DType::F16, 4, if changed { &[1] } else { &[1, 1] });
        plan.soft_cap = changed.then_some(2.0);
        plan
    };
    let mut agree = |fixture: &mut Fixture, changed| {
        let right = plain.backend.attend(&of(&other_part, changed)).unwrap();
        let answer = fixture.backend.attend(&of(&part, changed)).unwrap();
        assert_eq!((answer.out, answer.lse), (right.out, right.lse), "changed: {changed}");
    };
    // A graph; kernel by kernel, and then it would be changed.
    for changed in [false, false, true] {
        agree(&mut fixture, changed);
    }
    let live = fixture.watch.lock().live;
    fixture.watch.lock().fail = Fail::Node;
    assert_eq!(ask(&mut fixture, &of(&part, true)), Err(ErrorCode::LimitExceeded));
    assert_eq!(fixture.watch.lock().live, live - 1);
    // It would run other words than it was made with.
    fixture.watch.lock().fail = Fail::Never;
    for changed in [false, false, true] {
        agree(&mut fixture, changed);
    }
    let launches = fixture.backend.backend.launches();
    assert_eq!((launches.graphs_built, launches.graphs_off), (2, None));
    assert_eq!(fixture.backend.failure(), None);
}

#[test]
fn graphs_are_bounded_and_one_that_fails_fails_the_device() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", CudaOptions { graphs: 1, ..OPTIONS });
    let plan = plan(&part, DType::F32, 2, &[1]);
    fixture.backend.repeat = 2;
    let right = fixture.backend.attend(&plan).unwrap();
    let live = fixture.watch.lock().live;
    fixture.backend.repeat = 6;
    for _ in 0..20 {
        // By the host is another sequence, for which there is room after four calls.
        for _ in 0..6 {
            assert_eq!(fixture.backend.backend.attend(&plan).unwrap().out, right.out);
        }
        assert_eq!(fixture.watch.lock().live, live);
        assert_eq!(fixture.backend.attend(&plan).unwrap().out, right.out);
        assert_eq!(fixture.watch.lock().live, live);
    }
    assert_eq!(fixture.watch.lock().graphs, 41);
    fixture.watch.lock().fail = Fail::Launch;
    assert_eq!(ask(&mut fixture, &plan), Err(ErrorCode::DeviceFailed));
    let failure = fixture.backend.failure().unwrap().to_owned();
    assert!(failure.contains("launch_graph"), "{failure}");
    assert_eq!(ask(&mut fixture, &plan), Err(ErrorCode::DeviceFailed));
    let Fixture { backend, watch, .. } = fixture;
    drop(backend);
    let watch = watch.lock();
    assert_eq!((watch.calls_after_failure, watch.live), (0, 0));
}

#[test]
fn a_model_that_goes_takes_its_graphs_along() {
    if !is_available() {
        return;
    }
    let given_back = [0, 4].map(|graphs| {
        let (mut fixture, part) = with_rows("raw", CudaOptions { graphs, ..OPTIONS });
        let plan = plan(&part, DType::F32, 2, &[1]);
        for _ in 0..3 {
            fixture.backend.attend(&plan).unwrap();
            fixture.backend.backend.attend(&plan).unwrap();
        }
        let live = fixture.watch.lock().live;
        fixture.backend.backend.unregister(ModelId(1));
        let given_back = live - fixture.watch.lock().live;
        // A later model's launches of these kernels are another sequence.
        let part = write_rows(&mut fixture.backend.backend, "raw", &geometry());
        let launched = fixture.backend.backend.launches().kernels;
        ask(&mut fixture, &super::plan(&part, DType::F32, 2, &[1])).unwrap();
        assert_eq!(fixture.backend.backend.launches().kernels, launched + 4);
        assert_eq!(fixture.backend.failure(), None);
        given_back
    });
    // Its tables both times; and a graph for the region, and one for the host.
    assert_eq!(given_back[1], given_back[0] + 2);
}

/// Leaves a graph under way, of whose answer nobody has heard, and gives its model up; what the
/// driver complains of.
fn given_up_under_way(planted: Planted) -> Vec<String> {
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let plan = plan(&part, DType::F32, 2, &[1]);
    fixture.backend.repeat = 2;
    fixture.backend.attend(&plan).unwrap();
    let (places, _) = fixture.backend.plan_places(&plan);
    let Fixture { backend, watch, memory, .. } = fixture;
    let mut backend = backend.backend;
    let graphs = watch.lock().graphs;
    // Between the launch and the wait for it is the only way out of a call.
    let mut leave = || std::panic::resume_unwind(Box::new(()));
    let call = || backend.attend_in_place(&plan, &places, &mut leave).map(drop);
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).unwrap_err();
    let seen = || {
        let watch = watch.lock();
        (watch.graphs, watch.waits, watch.live)
    };
    let (launched, waits, live) = seen();
    assert_eq!(launched, graphs + 1);
    watch.lock().planted = planted;
    backend.unregister(ModelId(1));
    let complaints = watch.lock().complaints.clone();
    let (_, now, left) = seen();
    assert!(now > waits && left < live);
    drop(backend);
    drop(memory);
    complaints
}

#[test]
fn a_graph_is_not_given_back_while_its_launch_is_under_way() {
    if !is_available() {
        return;
    }
    assert_eq!(given_up_under_way(Planted::Nothing), Vec::<String>::new());
    let complaints = given_up_under_way(Planted::HostDoesNotWait);
    assert!(complaints[0].contains("a graph is given back that is under way"), "{complaints:?}");
}

#[test]
fn a_graph_that_does_not_wait_for_its_tables_is_noticed() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let plan = plan(&part, DType::F16, 2, &[1]);
    fixture.backend.repeat = 2;
    fixture.backend.attend(&plan).unwrap();
    fixture.watch.lock().planted = Planted::KernelsDoNotWait;
    assert_eq!(ask(&mut fixture, &plan), Err(ErrorCode::DeviceFailed));
    let watch = fixture.watch.lock();
    assert_eq!(watch.calls["launch_graph"], 2);
    assert!(watch.complaints[0].contains("before a copy that was asked"), "{watch:?}");
}
