/** The server's own types, as its OpenAPI document has them. */
import type { components as run } from "./run/schema";
import type { components } from "./schema";

type Schemas = components["schemas"];
export type AdapterDetail = Schemas["AdapterDetail"];
export type AdapterList = Schemas["AdapterList"];
export type AdapterLoaded = Schemas["AdapterLoaded"];
export type AdapterNoted = Schemas["AdapterNoted"];
export type AdapterMerged = Schemas["AdapterMerged"];
export type AdapterSummary = Schemas["AdapterSummary"];
export type AdapterUploaded = Schemas["AdapterUploaded"];
export type AdapterVersion = Schemas["AdapterVersion"];
export type BatchAnswer = Schemas["BatchAnswer"];
export type BatchCompletion = Schemas["BatchCompletion"];
export type CancelAnswer = Schemas["CancelAnswer"];
export type ChatCompletion = Schemas["ChatCompletion"];
export type ConfigAnswer = Schemas["ConfigAnswer"];
export type DecodeStats = Schemas["DecodeStats"];
export type ErrorEnvelope = Schemas["ErrorEnvelope"];
export type Health = Schemas["Health"];
export type JobHealth = Schemas["JobHealth"];
export type JobMetrics = Schemas["JobMetrics"];
export type MetricDefinition = Schemas["MetricDefinition"];
export type MetricDefinitions = Schemas["MetricDefinitions"];
export type RecentRequest = Schemas["RecentRequest"];
export type FacetCount = Schemas["FacetCount"];
export type RolloutDetail = Schemas["RolloutDetail"];
export type RolloutFacets = Schemas["RolloutFacets"];
export type RolloutGroup = Schemas["RolloutGroupDetail"];
export type RolloutPage = Schemas["RolloutPage"];
export type RolloutRow = Schemas["RolloutRow"];
export type TextCompletion = Schemas["TextCompletion"];
export type TokenLogprob = Schemas["TokenLogprob"];
export type TrainStatus = Schemas["TrainStatus"];
export type TrainSubmitted = Schemas["TrainSubmitted"];

/** Those of `groupwise ui`, which shows runs on disk. */
type RunSchemas = run["schemas"];
export type RunDetail = RunSchemas["RunDetail"];
export type RunDiff = RunSchemas["RunDiff"];
export type RunEvaluations = RunSchemas["RunEvaluations"];
export type RunHealth = RunSchemas["RunHealth"];
export type RunList = RunSchemas["RunList"];
export type RunMetrics = RunSchemas["RunMetrics"];
export type RunRollout = RunSchemas["RunRollout"];
export type RunRolloutGroup = RunSchemas["RunRolloutGroup"];
export type RunSummary = RunSchemas["RunSummary"];
