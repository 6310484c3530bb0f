"""The command line of the benchmarks."""

from __future__ import annotations

from suite.application import Cases, application
from suite.cases.badnetwork import BadNetwork
from suite.cases.batch_model import BatchModelCase
from suite.cases.bubbles import Bubbles
from suite.cases.burst import Burst
from suite.cases.cells import Cells
from suite.cases.changes import Changes
from suite.cases.chaos import Chaos
from suite.cases.checkpoints import Checkpoints
from suite.cases.clipgroups import ClipGroups
from suite.cases.clipmemory import ClipMemory
from suite.cases.clips import Clips
from suite.cases.commands import Commands
from suite.cases.controller import ControllerTime
from suite.cases.decodes import Decodes
from suite.cases.elastic import Elastic
from suite.cases.fewsteps import FewSteps
from suite.cases.forming import Forming
from suite.cases.frontdoor import FrontDoor
from suite.cases.frontends import FrontEnds
from suite.cases.fuzz import Fuzz
from suite.cases.groups import GroupTime
from suite.cases.growth import Growth
from suite.cases.journal import JournalCost
from suite.cases.links import Links
from suite.cases.load import Load
from suite.cases.loras import Loras
from suite.cases.manynodes import ManyNodes
from suite.cases.modelled import Modelled
from suite.cases.mutations import Mutations, Sampled
from suite.cases.nodes import Nodes
from suite.cases.observe import Observe
from suite.cases.opensora import OpenSora
from suite.cases.page import PageFrames
from suite.cases.patchcache import PatchCaching
from suite.cases.patches import Patches
from suite.cases.patchsize import PatchSize
from suite.cases.placement import Placement
from suite.cases.plan import Plan
from suite.cases.policytime import PolicyTime
from suite.cases.promised import Promised
from suite.cases.promises import Reservations
from suite.cases.queue import QueueLength
from suite.cases.ready import Ready
from suite.cases.registry import RegistryFaults
from suite.cases.replace import Replace
from suite.cases.reports import ReportCost
from suite.cases.residency import Residency
from suite.cases.ring import RingSpeed
from suite.cases.robust import Robust
from suite.cases.sets import SetsOfServers
from suite.cases.siege import Siege
from suite.cases.simspeed import SimSpeed
from suite.cases.simulate import Simulate
from suite.cases.soak import Soak
from suite.cases.stack import Stack
from suite.cases.stitcher import Stitcher
from suite.cases.stock import StockCalls
from suite.cases.swaps import Swaps
from suite.cases.theorem import Theorem
from suite.cases.together import Together
from suite.cases.trident import Trident
from suite.cases.ucx import UcxMessages
from suite.cases.weights import Weights

CASES: Cases = {
    "stack": ("One request at a time through the whole stack, against the stock pipeline", Stack),
    "stock": ("The family of any pipeline, step by step, against the stock call and families by hand", StockCalls),
    "clips": ("Clips as files: one at a time against the stock pipeline, and idle time of the device", Clips),
    "controller": ("Time of the controller per event", ControllerTime),
    "policytime": ("Time of a decision of tilework, on 8, 128 and 4096 devices, and of tetriserve", PolicyTime),
    "burst": ("16,000 requests that come at once to 4096 idle devices: accepted, placed and started", Burst),
    "manynodes": ("Requests per second that one controller decides for, on up to 64 nodes", ManyNodes),
    "placement": ("Time of a decision with weights that do not all fit, on 128, 1024 and 4096 devices", Placement),
    "simspeed": ("Events per second of simulations on 8 and 128 devices", SimSpeed),
    "robust": ("What noise, a wrong table and changes of devices cost tilework and others, simulated", Robust),
    "fewsteps": ("Deadlines kept with 4 and 8 steps against 28, of what can be kept, simulated", FewSteps),
    "decodes": ("Requests of few steps that share their decode: measured costs, simulated traffic", Decodes),
    "clipmemory": (
        "Decodes of clips in parts: memory as planned, as allocated and as stock takes it, and time",
        ClipMemory,
    ),
    "trident": ("Decisions of tridentserve on 1024 and 4096 devices: time, and value against the solver's", Trident),
    "replace": ("A live server that re-places its stages while the mix of requests shifts", Replace),
    "residency": ("Many checkpoints on few devices: tilework between a cache and one that knows the future", Residency),
    "promised": ("One more promise when 25,000 are given: CPU time of the answer", Promised),
    "queue": ("One more request behind 20,000 others: time and memory in the controller", QueueLength),
    "promises": ("Promised deadlines and predicted finishes at 0.5 to 3 times capacity, simulated", Reservations),
    "siege": ("What floods of a tenant, or without a key, cost another tenant", Siege),
    "frontends": ("What front ends change at the door", FrontEnds),
    "frontdoor": ("Time until a request is accepted or refused, with 1,000 waiting", FrontDoor),
    "load": (
        "Time until a request is accepted or refused, for ten minutes, with 20,000 waiting and 2,000 connections open",
        Load,
    ),
    "journal": (
        "Calls on the disk before they are accepted: what an fsync costs, alone and shared",
        JournalCost,
    ),
    "observe": ("Metrics, event log and the page: what they cost in throughput", Observe),
    "page": ("The page at / in a browser: what a frame costs, with 10,000 tiles in view", PageFrames),
    "bubbles": ("Idle time of busy workers between two runs", Bubbles),
    "patches": ("Requests of several sizes in one forward pass, against one by one", Patches),
    "patchcache": ("The patch cache: what it costs when nothing is reused, and what it gains", PatchCaching),
    "patchsize": ("Smaller patches than necessary: throughput, and the pictures against one by one", PatchSize),
    "stitcher": ("Normalisation, SiLU and frames of patches in one pass, against several and a copy", Stitcher),
    "badnetwork": ("Nodes and servers that are lost on a network that delays and loses", BadNetwork),
    "batch_model": ("The predicted time of batches: how well, on a CPU and simulated, and how fast", BatchModelCase),
    "together": ("Mixed traffic on a live server, in batches and one by one", Together),
    "commands": ("The commands of README and docs, run as they stand there", Commands),
    "ready": ("Time from the start of the server to ready", Ready),
    "cells": ("A denoiser whose weights two devices have together: memory of each, and time of a step", Cells),
    "weights": ("Memory of CPU workers with one copy of the weights, and with one each", Weights),
    "swaps": ("Two models in turn on a device with room for one: the cost beyond their loads", Swaps),
    "loras": ("LoRAs on a device: what they cost steps that use one, and others", Loras),
    "changes": ("Models and LoRAs added and removed 300 times: what grows, and how long a change takes", Changes),
    "checkpoints": ("Many checkpoints on one device: requests on time, live and simulated", Checkpoints),
    "chaos": ("Workers killed under load: nothing is lost, and how soon requests continue", Chaos),
    "links": ("A worker killed while another runs for minutes: how soon the others go on, and form groups", Links),
    "forming": ("A member killed while its group forms: how soon the survivors are free", Forming),
    "fuzz": ("Scenarios where things go wrong, simulated: is anything violated that must hold", Fuzz),
    "sampled": ("Bugs injected into server, runtime, workers, pipelines: what a commit's tests miss of them", Sampled),
    "mutations": ("Bugs injected into controller and policies: does simulation or a test catch them", Mutations),
    "growth": ("100,000 calls of 5,000 sizes: what they leave behind in the memory of the server", Growth),
    "soak": ("Mixed traffic with random kills for twenty minutes: memory and attainment", Soak),
    "ring": (
        "Messages between processes of a node: the ring, pipes and ZeroMQ, also when a sender is killed",
        RingSpeed,
    ),
    "ucx": (
        "Messages between nodes: the ring over UCX, NIXL, Redis Streams, also when a sender is killed",
        UcxMessages,
    ),
    "reports": ("A picture on its way from a worker to the engine: pipe, ring, file", ReportCost),
    "groups": ("Forming a group of workers, and opening it again", GroupTime),
    "clipgroups": ("Decodes of clips on two workers, and what share of a clip they are", ClipGroups),
    "elastic": ("Changing the degree, moving the state, sharing guidance", Elastic),
    "nodes": ("Works and states across two nodes, against one", Nodes),
    "registry": ("A registry that is silent, wrong, wiped or slow", RegistryFaults),
    "sets": ("Several servers behind one registry: how soon another leads, and refusals that name one", SetsOfServers),
    "modelled": ("Deadlines kept by each policy on eight simulated GPUs, live and simulated", Modelled),
    "plan": ("The number of devices that a plan names, and one fewer, live; and how long a plan takes", Plan),
    "opensora": ("DDiT's videos on eight simulated GPUs behind a live server: latency by policy", OpenSora),
    "theorem": ("OnePiece's Theorem 1 on live workers: output over input, and how waits grow", Theorem),
    "simulate": ("A live run against its own simulation", Simulate),
}


app = application(
    CASES,
    "bench/run.py",
    "Measure speed and memory; without CASES all of them, which takes hours on two cores, most of them "
    "for mutations, sampled, fuzz, soak and load. The machine should do nothing else. Exit status 1 if a goal is "
    "missed.",
    "stack bubbles --write",
)
