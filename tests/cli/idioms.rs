//! Training loops as scripts write them, recorded by `bench/idioms`: they import, plan to 80 % and run, and
//! their losses are PyTorch's.

use serde_json::Value;

use crate::cli::folder::{Folder, fixture};

/// Imports an idiom's trace as `job.graph.json`; what it says.
fn import(folder: &Folder, idiom: &str) -> String {
    let trace = fixture(&format!("idioms/{idiom}.et.json.gz"));
    folder.neap(&["import", &trace, "-o", "job.graph.json"]).stderr
}

fn plan(folder: &Folder) {
    let device = ["--device", "h100", "--budget", "80%"];
    let output = ["-o", "job.plan.json"];
    folder.json(&[&["plan", "job.graph.json"], &device[..], &output[..]].concat());
}

fn losses(idiom: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(fixture(&format!("idioms/{idiom}.json"))).unwrap();
    let record: Value = serde_json::from_str(&text).unwrap();
    record["losses"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect()
}

fn trains_as_pytorch(idiom: &str) {
    let folder = Folder::new();
    let said = import(&folder, idiom);
    assert!(!said.contains("frozen") || idiom == "lion", "{idiom}: {said}");
    plan(&folder);
    let weights = fixture(&format!("idioms/{idiom}.safetensors"));
    let run = |subject: &str| {
        folder.json(&["run", subject, "--on", "host", "--weights", &weights, "--iterations", "6"])
    };
    let (plain, planned) = (run("job.graph.json"), run("job.plan.json"));
    assert_eq!(plain["losses"], planned["losses"], "{idiom}");
    let found = plain["losses"].as_array().unwrap();
    let expected = losses(idiom);
    assert_eq!(found.len(), expected.len(), "{idiom}");
    for (found, expected) in found.iter().zip(expected) {
        let off = (found.as_f64().unwrap() - expected).abs();
        assert!(off < 1e-4, "{idiom}: {found} where PyTorch has {expected}");
    }
}

#[test]
fn parameter_groups_each_have_their_settings() {
    trains_as_pytorch("groups_three");
}

#[test]
fn a_schedule_changes_rate_and_momentum() {
    trains_as_pytorch("schedule_onecycle");
}

#[test]
fn an_average_reads_parameters_after_the_step() {
    trains_as_pytorch("average_lerp");
}

#[test]
fn weights_are_clamped_after_the_step() {
    trains_as_pytorch("weight_clamp");
}

#[test]
fn two_optimizers_step_in_one_iteration() {
    trains_as_pytorch("two_optimizers");
}

#[test]
fn a_step_may_run_inside_backward() {
    trains_as_pytorch("step_in_backward");
}

#[test]
fn a_closure_computes_inside_the_step() {
    trains_as_pytorch("closure");
}

#[test]
fn capturable_and_tensor_rates_are_lowered() {
    trains_as_pytorch("capturable");
    trains_as_pytorch("tensor_rate");
}

#[test]
fn six_more_optimizers_step_as_pytorch_does() {
    for idiom in ["nadam", "radam", "adamax", "adadelta_decay", "asgd", "rprop"] {
        trains_as_pytorch(idiom);
    }
}

#[test]
fn losses_know_the_numbers_inside_pytorch_s_own_python() {
    for idiom in ["loss_kl", "loss_gaussian", "loss_l1", "distilled"] {
        trains_as_pytorch(idiom);
    }
}

#[test]
fn a_backward_of_a_backward_and_two_backwards_run() {
    for idiom in ["gradient_penalty", "sharpness_aware", "adversarial", "checkpointed"] {
        trains_as_pytorch(idiom);
    }
}

#[test]
fn an_activation_in_place_keeps_its_input_for_backward() {
    trains_as_pytorch("activations_in_place");
}

#[test]
fn halves_are_rounded_after_each_operation_of_a_step() {
    for idiom in ["bf16_adamw", "f16_adam"] {
        trains_as_pytorch(idiom);
    }
}

#[test]
fn a_gradient_scaler_runs_with_weights() {
    trains_as_pytorch("scaler");
}

#[test]
fn averaged_models_and_steps_by_hand_run() {
    trains_as_pytorch("averaged");
    trains_as_pytorch("by_hand");
}

#[test]
fn layers_of_other_kinds_run() {
    for idiom in [
        "lstm",
        "conv1d",
        "conv3d",
        "conv_pointwise",
        "spectral_norm",
        "embedding_bag",
        "experts",
        "attention_biased",
    ] {
        trains_as_pytorch(idiom);
    }
}

#[test]
fn an_optimizer_of_the_script_s_own_runs_as_recorded() {
    trains_as_pytorch("lion");
}

#[test]
fn clipping_and_unscaling_are_split_by_tensor() {
    for idiom in ["clip_norm", "scaler"] {
        let folder = Folder::new();
        import(&folder, idiom);
        plan(&folder);
        let graph: Value = serde_json::from_str(&folder.text("job.graph.json")).unwrap();
        for operator in graph["operators"].as_array().unwrap() {
            let lists = operator["args"].as_array().unwrap().iter().filter_map(Value::as_array);
            let several = lists.filter(|l| l.len() > 1 && l[0].get("tensor").is_some()).count();
            let kind = operator["kind"].as_str().unwrap();
            assert!(!kind.contains("_foreach_") || several == 0, "{idiom}: {operator}");
        }
    }
}

#[test]
fn an_operator_may_return_one_tensor_twice() {
    let folder = Folder::new();
    import(&folder, "lstm");
    plan(&folder);
    folder.json(&["check", "job.plan.json"]);
    folder.json(&["simulate", "job.plan.json"]);
}
