import { useEffect, useRef, useState } from "preact/hooks";
import { Refused, get, keySet } from "./api";
import { CacheFields, kindsOf } from "./CacheFields";
import { Comparison } from "./Comparison";
import { choices, compare, type Compared } from "./compare";
import { Result } from "./Result";
import { run, settingOf, type Cache, type Run, type Wish } from "./run";
import type { Model, NotServed } from "./state";

const SIDES = [64, 128, 256, 512, 768, 1024, 1536, 2048];
const MOST_KEPT = 12;
/** Prompts that the shipped models draw. */
const EXAMPLE = "a large red circle on a blue background";
const EXAMPLE_OF_A_CLIP = "a red circle moves left on a black background";

/** What was sent from here: a request, or several with caches to compare. */
interface Entry {
  id: number;
  pictures: Compared[];
  total: number;
  stop: AbortController;
}

/** Fields of a request, and what has become of those that were sent from here. */
export function Playground() {
  const [models, setModels] = useState<Model[]>([]);
  const [missing, setMissing] = useState<NotServed[]>([]);
  const [trouble, setTrouble] = useState("");
  const [entries, setEntries] = useState<Entry[]>([]);
  const [shown, setShown] = useState<number | null>(null);
  const next = useRef(1);

  useEffect(() => {
    let timer: ReturnType<typeof setTimeout>;
    const ask = (): void => {
      clearTimeout(timer);
      get<{ data: Model[]; not_served: NotServed[] }>("/v1/models").then(
        (answer) => (setModels(answer.data), setMissing(answer.not_served), setTrouble("")),
        (error: unknown) => {
          setTrouble(error instanceof Refused ? error.message : "The server does not answer.");
          timer = setTimeout(ask, 2000);
        },
      );
    };
    ask();
    keySet.add(ask);
    return () => {
      clearTimeout(timer);
      keySet.delete(ask);
    };
  }, []);

  const send = (wish: Wish, isComparison: boolean): void => {
    const id = next.current++;
    const stop = new AbortController();
    const total = isComparison ? choices(wish).length : 1;
    const change = (pictures: Compared[]): void =>
      setEntries((all) => {
        const others = all.filter((one) => one.id !== id);
        for (const { pictures } of others.slice(MOST_KEPT - 1))
          for (const { run } of pictures) if (run.video) URL.revokeObjectURL(run.video);
        return [{ id, pictures, total, stop }, ...others.slice(0, MOST_KEPT - 1)].sort((a, b) => b.id - a.id);
      });
    setShown(id);
    if (isComparison) void compare(wish, change, stop.signal);
    else void run(wish, (now) => change([{ run: now, psnr_db: null }]), stop.signal);
  };

  const current = entries.find((one) => one.id === shown) ?? entries[0];
  const cancel = (): void => current?.stop.abort();
  return (
    <div class="playground">
      {models.length ? (
        <Form models={models} missing={missing} send={send} />
      ) : (
        <section class="card pad">
          <p class="soft">{trouble || "Asking the server for its models …"}</p>
        </section>
      )}
      <div class="results">
        {current && current.total > 1 ? (
          <Comparison key={current.id} pictures={current.pictures} total={current.total} cancel={cancel} />
        ) : current ? (
          <Result key={current.id} run={current.pictures[0]!.run} cancel={cancel} />
        ) : (
          <section class="card empty">
            <p class="soft">Your picture appears here while it is made.</p>
          </section>
        )}
        {entries.length > 1 && (
          <div class="thumbnails" role="group" aria-label="Earlier results">
            {entries.map(({ id, pictures: [first] }) => (
              <button
                key={id}
                aria-label={`Result ${id}: ${first!.run.wish.prompt}`}
                aria-current={id === current?.id}
                onClick={() => setShown(id)}
              >
                <Thumbnail run={first!.run} />
              </button>
            ))}
          </div>
        )}
      </div>
    </div>
  );
}

function Thumbnail({ run: one }: { run: Run }) {
  const url = one.frames[0] ?? one.preview;
  if (url) return <img src={url} alt="" />;
  return <span class="soft">{one.video ? "▶" : one.state}</span>;
}

type Send = (wish: Wish, isComparison: boolean) => void;

function Form({ models, missing, send }: { models: Model[]; missing: NotServed[]; send: Send }) {
  const [id, setId] = useState(models[0]!.id);
  const model = models.find((one) => one.id === id) ?? models[0]!;
  const about = model.tilework;
  const [usualWidth, usualHeight] = about.default_size.split("x").map(Number) as [number, number];
  const [pictures, setPictures] = useState<Record<string, string>>({});
  const prompt = useRef<string | null>(null); // As typed.
  const [cache, setCache] = useState<Cache["name"]>("off");
  useEffect(() => (setPictures({}), setCache("off")), [id]);
  const compareButton = useRef<HTMLButtonElement>(null);
  const hasCaches = kindsOf(model).length > 0;
  const makesClips = about.makes_videos || about.default_frames > 1;

  const submit = (event: Event): void => {
    event.preventDefault();
    const data = new FormData(event.target as HTMLFormElement);
    const number = (name: string): number | null => {
      const text = String(data.get(name) ?? "").trim();
      return text === "" ? null : Number(text);
    };
    const wish: Wish = {
      model,
      prompt: String(data.get("prompt")),
      width: number("width") ?? usualWidth,
      height: number("height") ?? usualHeight,
      steps: number("steps") ?? about.default_steps,
      seed: number("seed"),
      frames: makesClips ? number("frames") : null,
      slo_s: number("slo_s"),
      onMiss: data.get("on_miss") as Wish["onMiss"],
      cache: hasCaches ? { name: cache, value: number("cache_value") } : null,
      isCompared: false,
      pictures,
    };
    const button = (event as SubmitEvent).submitter; // Null by the keyboard.
    send(wish, button !== null && button === compareButton.current);
  };
  const keys = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      (event.currentTarget as HTMLFormElement).requestSubmit();
    }
  };

  const sides = SIDES.filter((side) => side <= about.max_side && side % about.side_multiple === 0);
  return (
    <form class="card pad" onSubmit={submit} onKeyDown={keys} key={id}>
      <label>
        Prompt
        <textarea
          name="prompt"
          rows={3}
          required
          maxLength={4096}
          title="Key /; Esc leaves it"
          defaultValue={prompt.current ?? (makesClips ? EXAMPLE_OF_A_CLIP : EXAMPLE)}
          onInput={(event) => (prompt.current = event.currentTarget.value)}
        />
      </label>
      {about.words && (
        <p class="soft" aria-label="What it draws">
          Draws {Object.entries(about.words).map(([kind, words]) => `${kind}: ${words.join(", ")}`).join("; ")}.
        </p>
      )}
      <label>
        Model
        <select name="model" value={id} onChange={(event) => setId((event.target as HTMLSelectElement).value)}>
          {models.map((one) => (
            <option key={one.id} value={one.id}>
              {one.id}
            </option>
          ))}
        </select>
      </label>
      {missing.map((one) => (
        <p key={one.id} class="soft reason" aria-label="Not served">
          {one.id} is not served: {one.reason}
        </p>
      ))}
      <div class="fields">
        <label>
          Width
          <input name="width" type="number" min={about.side_multiple} max={about.max_side} step={about.side_multiple} defaultValue={usualWidth} list="sides" />
        </label>
        <label>
          Height
          <input name="height" type="number" min={about.side_multiple} max={about.max_side} step={about.side_multiple} defaultValue={usualHeight} list="sides" />
        </label>
        <datalist id="sides">
          {sides.map((side) => (
            <option key={side} value={side} />
          ))}
        </datalist>
        <label>
          Steps
          <input name="steps" type="number" min={1} max={200} defaultValue={about.default_steps} />
        </label>
        <label>
          Seed
          <input name="seed" type="number" min={0} placeholder="random" />
        </label>
        {makesClips && (
          <label>
            Frames
            <input name="frames" type="number" min={1} max={about.max_frames} placeholder={`${about.default_frames}`} />
          </label>
        )}
      </div>
      <div class="fields">
        <label>
          Deadline, s
          <input name="slo_s" type="number" min={0.001} step="any" placeholder={about.default_slo ?? "none"} />
        </label>
        <label class="grow">
          If it cannot be met
          <select name="on_miss">
            <option value="best_effort">serve it late</option>
            <option value="reject">refuse it now, or promise it</option>
            <option value="drop">drop it as soon as that is certain</option>
          </select>
        </label>
      </div>
      <CacheFields model={model} name={cache} choose={setCache} />
      {about.pictures
        .filter((one) => !one.is_clip)
        .map((one) => (
          <Picture
            key={one.name}
            name={one.name}
            isRequired={one.required}
            url={pictures[one.name]}
            set={(url) =>
              setPictures((all) => {
                const { [one.name]: _, ...others } = all;
                return url === null ? others : { ...others, [one.name]: url };
              })
            }
          />
        ))}
      <div class="bar submit">
        <button class="primary">Make it</button>
        {settingOf(model, cache) && cache !== "if_late" && (
          <button class="tool" ref={compareButton}>
            Compare caches
          </button>
        )}
        <span class="soft wide-only">
          <kbd>Ctrl</kbd> <kbd>Enter</kbd>
        </span>
      </div>
    </form>
  );
}

interface PictureProps {
  name: string;
  isRequired: boolean;
  url: string | undefined;
  set: (url: string | null) => void;
}

function Picture({ name, isRequired, url, set }: PictureProps) {
  const read = (event: Event): void => {
    const file = (event.target as HTMLInputElement).files?.[0];
    if (!file) return set(null);
    const reader = new FileReader();
    reader.onload = () => set(String(reader.result));
    reader.readAsDataURL(file);
  };
  return (
    <label class="picture">
      {name.replaceAll("_", " ")}
      {isRequired ? "" : " (optional)"}
      <input type="file" accept="image/png,image/jpeg,image/webp" required={isRequired} onChange={read} />
      {url && <img src={url} alt={`given as ${name}`} />}
    </label>
  );
}
