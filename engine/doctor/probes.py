"""Every probe, in the order of the report. One line here and one function is all that a new one takes."""

from __future__ import annotations

from engine.doctor import collectives, embedded, kafka, megatron, model, others, ray_workers, sglang
from engine.doctor.runner import Probe

_HERE = "engine.doctor"

PROBES = (
    Probe(
        "accelerator",
        "Accelerator recognised",
        "device",
        f"{_HERE}.accelerator:probe",
        60,
        collectives.no_torch,
        "a",
    ),
    Probe(
        "sglang",
        "SGLang has model and attention",
        "model",
        f"{_HERE}.sglang:probe",
        160,
        sglang.not_sglang,
        "b",
    ),
    Probe(
        "sglang-server", "A real SGLang server", "device", f"{_HERE}.sglang:server", 700, sglang.not_deep, "b"
    ),
    Probe(
        "megatron-patch",
        "Megatron and its patch fit",
        "device",
        f"{_HERE}.megatron:probe",
        120,
        megatron.not_asked,
        "c",
    ),
    Probe(
        "collectives",
        "Collectives of the device",
        "device",
        f"{_HERE}.collectives:probe",
        120,
        collectives.no_accelerator,
        "d",
    ),
    Probe(
        "memory-saver",
        "torch_memory_saver",
        "device",
        f"{_HERE}.memory_saver:probe",
        120,
        collectives.no_accelerator,
        "e",
    ),
    Probe("weight-sync", "Transport of the weights", "device", f"{_HERE}.transport:probe", 60, point="f"),
    Probe(
        "broadcast",
        "Broadcast between two processes",
        "device",
        f"{_HERE}.collectives:broadcast",
        120,
        collectives.not_deep,
        "f",
    ),
    Probe(
        "ray-workers",
        "Environment of Ray's workers",
        "network",
        f"{_HERE}.ray_workers:probe",
        180,
        ray_workers.no_ray,
        "g",
    ),
    Probe("node-address", "Address of this node", "network", f"{_HERE}.network:node_address", 20),
    Probe("network-card", "Training network card", "network", f"{_HERE}.network:training_card", 20),
    Probe("ports", "Ports, in both directions", "network", f"{_HERE}.others:ports", 180),
    Probe("ray-ports", "Ports of Ray", "network", f"{_HERE}.others:ray_ports", 180, others.no_cluster),
    Probe(
        "services",
        "Servers and brokers, from every node",
        "network",
        f"{_HERE}.others:services",
        180,
        others.no_services,
    ),
    Probe("shared-folders", "Shared folders", "network", f"{_HERE}.others:shared_folders", 120),
    Probe("clocks", "Clocks of the nodes", "network", f"{_HERE}.others:clocks", 180, others.alone),
    Probe(
        "versions", "Versions on the nodes", "network", f"{_HERE}.others:equal_versions", 180, others.alone
    ),
    Probe("subnets", "One network for all nodes", "network", f"{_HERE}.others:subnets", 180, others.alone),
    Probe("log-folder", "Folder of the log", "log", f"{_HERE}.embedded:writable", 30, embedded.not_embedded),
    Probe("log-sync", "Time of a sync", "log", f"{_HERE}.embedded:sync_time", 60, embedded.not_embedded),
    Probe(
        "log-locks", "Locks of the file system", "log", f"{_HERE}.embedded:locks", 60, embedded.not_embedded
    ),
    Probe("disk", "Room on the disk", "log", f"{_HERE}.embedded:room", 20),
    Probe("broker", "Broker reachable", "log", f"{_HERE}.kafka:reachable", 40, kafka.not_kafka),
    Probe("topics", "Topics as needed", "log", f"{_HERE}.kafka:topics", 60, kafka.not_kafka),
    Probe("retention", "Retention against the run", "log", f"{_HERE}.kafka:retention", 60, kafka.not_kafka),
    Probe("record-size", "Size of records", "log", f"{_HERE}.kafka:sizes", 40, kafka.not_kafka),
    Probe("producing", "Idempotent producing", "log", f"{_HERE}.kafka:producing", 90, kafka.not_deep),
    Probe("membership", "Consumer groups", "log", f"{_HERE}.kafka:membership", 90, kafka.not_deep),
    Probe("model", "Model whole", "model", f"{_HERE}.model:whole", 30, model.no_model),
    Probe(
        "tokenizer",
        "Tokenizer and chat template alike",
        "model",
        f"{_HERE}.model:tokenizers",
        480,
        model.no_model,
    ),
)
