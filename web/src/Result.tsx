import { useEffect, useState } from "preact/hooks";
import { Decisions } from "./Decisions";
import { OTHERS } from "./colours";
import { hasEnded, type Run } from "./run";
import type { Segment, Timeline } from "./state";
import { cacheText, devicesText, seconds } from "./words";

const FLIP_MS = 125;

/** What a request looks like now, and how it went. */
export function Result({ run, cancel }: { run: Run; cancel: () => void }) {
  const isOpen = !hasEnded(run);
  const { wish, timeline } = run;
  return (
    <section class="card result" aria-label="Result" aria-busy={isOpen}>
      <Shown run={run} />
      <div class="pad">
        <p class="prompt">{wish.prompt}</p>
        {isOpen && <Progress run={run} cancel={cancel} />}
        {run.trouble && (
          <p class="bad" role="alert">
            {run.trouble}
          </p>
        )}
        {run.state === "cancelled" && <p class="soft">Cancelled.</p>}
        {timeline && <Outcome timeline={timeline} isIfLate={wish.cache?.name === "if_late"} />}
        {run.state === "done" && run.uid && (
          <>
            <div class="bar flush">
              <Save run={run} />
            </div>
            <h3>Why it went so</h3>
            <Decisions uid={run.uid} version={run.state} />
          </>
        )}
      </div>
    </section>
  );
}

export function Shown({ run }: { run: Run }) {
  const { wish } = run;
  const [place, setPlace] = useState(0);
  useEffect(() => {
    if (run.frames.length < 2) return;
    const timer = setInterval(() => setPlace((now) => now + 1), FLIP_MS);
    return () => clearInterval(timer);
  }, [run.frames.length]);
  const size = { aspectRatio: `${wish.width} / ${wish.height}`, maxWidth: `max(${wish.width}px, min(100%, 384px))` };
  if (run.video) return <video class="shown" style={size} src={run.video} controls autoplay loop muted playsInline aria-label="The video" />;
  const url = run.frames[place % Math.max(1, run.frames.length)] ?? run.preview;
  if (!url) return <div class="shown blank" style={size} aria-hidden="true" />;
  const isUnfinished = !run.frames.length;
  return <img class={`shown ${isUnfinished ? "unfinished" : ""}`} style={size} src={url} alt={isUnfinished ? "Unfinished preview" : wish.prompt} />;
}

interface ProgressProps {
  run: Run;
  cancel: () => void;
  /** Which of several pictures it is, from 0 on. */
  place?: number;
  total?: number;
}

export function Progress({ run, cancel, place = 0, total = 1 }: ProgressProps) {
  const [, again] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => again((count) => count + 1), 200);
    return () => clearInterval(timer);
  }, []);
  const passed_s = (performance.now() - run.began_ms) / 1e3;
  const left_s = run.eta_s === null ? null : run.eta_s - passed_s;
  return (
    <div role="status">
      <progress max={total * run.wish.steps} value={place * run.wish.steps + run.step} aria-label="Steps" class="whole" />
      <div class="bar flush">
        <span class="num">
          {total > 1 && `picture ${place + 1} of ${total}, `}
          {run.state === "asking" ? "asking" : `${run.state}, step ${run.step} of ${run.wish.steps}`}
          {left_s !== null && `, ready in ${seconds(Math.max(0, left_s))}`}
        </span>
        <button class="tool" onClick={cancel}>
          Cancel
        </button>
      </div>
    </div>
  );
}

function Outcome({ timeline, isIfLate }: { timeline: Timeline; isIfLate: boolean }) {
  const { slo_s: slo, latency_s: latency, cache } = timeline;
  const end_s = Math.max(latency, slo !== null && slo < 2 * latency ? slo : 0) * 1.02;
  const devices = [...new Set(timeline.segments.flatMap((one) => one.devices))].sort((a, b) => a - b);
  const at = (time_s: number): string => `${(100 * time_s) / end_s}%`;
  return (
    <>
      <p class="num">
        Took <b>{seconds(latency)}</b>, was expected to take {seconds(timeline.eta_s)}.{" "}
        {timeline.on_time !== null && slo !== null && (
          <b class={timeline.on_time ? "good" : "bad"}>
            {timeline.on_time ? `On time, ${seconds(slo - latency)} to spare.` : `${seconds(latency - slo)} late.`}
          </b>
        )}{" "}
        {cache ? `Cache: ${cacheText(cache)}. ` : isIfLate && "The cache was not used. "}
        <span class="soft">Seed {timeline.seed}.</span>
      </p>
      {timeline.warnings.map((one) => (
        <p class="soft" key={one}>
          {one}
        </p>
      ))}
      <div class="lanes" role="img" aria-label={timeline.segments.map(segmentText).join("; ")}>
        {devices.map((device) => (
          <div class="lane" key={device}>
            <span class="soft num">{device}</span>
            <div>
              {timeline.segments
                .filter((one) => one.devices.includes(device))
                .map((one, place) => (
                  <i
                    key={place}
                    title={segmentText(one)}
                    style={{
                      left: at(one.start_s),
                      width: `max(2px, ${at(one.end_s - one.start_s)})`,
                      background: one.steps ? "var(--accent)" : OTHERS,
                    }}
                  />
                ))}
              {slo !== null && slo <= end_s && <b style={{ left: at(slo) }} title={`deadline, ${seconds(slo)}`} />}
            </div>
          </div>
        ))}
      </div>
    </>
  );
}

const segmentText = (one: Segment): string =>
  `${one.steps ? `${one.steps} step${one.steps > 1 ? "s" : ""}` : one.stage} on ${devicesText(one.devices)}, ${seconds(one.end_s - one.start_s)}` +
  (one.batch > 1 ? `, together with ${one.batch - 1} other` : "");

function Save({ run }: { run: Run }) {
  const url = run.video ?? run.frames[0];
  if (!url) return null;
  return (
    <a class="tool" href={url} download={`${run.uid}.${run.video ? "mp4" : "png"}`}>
      Save
    </a>
  );
}
