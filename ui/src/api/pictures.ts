/** Pictures: those that are kept, as data: URLs, which the page may show whatever key there is; and files that are asked about. */
import { request } from "./http";

/** A picture that somebody chose: its file as a data: URL. */
export interface Given {
  url: string;
  name: string;
}

export type Content = string | ({ type: "image_url"; image_url: { url: string } } | { type: "text"; text: string })[];

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/tiff"];
const MOST_BYTES = 32 * 2 ** 20; // of one, as the server reads it

/** One that is named by a rollout, as `/v1/images/<sha256>`. Throws ApiError. */
export async function pictureAt(address: string): Promise<string> {
  return dataUrl(await (await request(address.replace(/^\//, ""))).blob());
}

/** Read the files, as far as `room` characters are enough for all of their URLs; of the first that is none, why. */
export async function taken(files: Iterable<File>, room: number): Promise<{ given: Given[]; refused: string }> {
  const given: Given[] = [];
  for (const file of files) {
    const name = file.name || "picture";
    if (!KINDS.includes(file.type)) return { given, refused: `${name} is ${file.type || "of no known kind"}. PNG, JPEG, WebP, GIF, BMP and TIFF are read.` };
    if (file.size > MOST_BYTES) return { given, refused: `${name} has ${megabytes(file.size)}; a picture has at most ${megabytes(MOST_BYTES)}.` };
    const url = await dataUrl(file);
    room -= url.length;
    if (room < 0) return { given, refused: `With ${name} this would be larger than one request may be. Make it smaller, or serve with a larger chat_body_bytes.` };
    given.push({ url, name });
  }
  return { given, refused: "" };
}

/** What is said, with pictures in front of it. */
export function content(text: string, pictures: Given[] = []): Content {
  if (!pictures.length) return text;
  const images = pictures.map(({ url }) => ({ type: "image_url" as const, image_url: { url } }));
  return text ? [...images, { type: "text" as const, text }] : images;
}

const megabytes = (size: number): string => `${(size / 1e6).toFixed(1)} MB`;

function dataUrl(file: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error ?? new Error("it cannot be read"));
    reader.readAsDataURL(file);
  });
}
