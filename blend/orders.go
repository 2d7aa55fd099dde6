package blend

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"mula/shards/facts"
)

// orderParsers lists the order versions that this program reads, as in the JSON text of a
// plan.json. A parser validates nothing. It also returns the fingerprint that the file claims.
func orderParsers() []orderParser {
	return []orderParser{
		{strconv.Itoa(OrderVersion), parseNative},
		{strconv.Itoa(AmendedVersion), parseAmended},
		{strconv.Quote(BlocksOrder), parseBlocks},
		{strconv.Quote(BlocksAmendedOrder), parseBlocksAmended},
		{strconv.Quote(MegatronOrder), parseMegatron},
		{strconv.Quote(PackedOrder), parsePacked},
		{strconv.Quote(PackedAmendedOrder), parsePackedAmended},
	}
}

type orderParser struct {
	version string
	parse   func(data []byte) (*Plan, string, error)
}

// parseOrder parses a plan.json of an order version.
func parseOrder(version string, data []byte) (*Plan, string, error) {
	var known []string
	for _, o := range orderParsers() {
		if o.version == version {
			return o.parse(data)
		}
		known = append(known, o.version)
	}
	last := len(known) - 1
	return nil, "", fmt.Errorf("order version %.40s is not supported; this program reads versions %s and %s", version,
		strings.Join(known[:last], ", "), known[last])
}

// An orderConfig is a value of `order` in blend.yaml. problems returns the errors of a
// configuration that can be found without the shards, as [Config.problems] does. survey returns the
// open shards and the plan of a configuration, as the function survey does.
type orderConfig struct {
	name     string
	problems func(c *Config, decoded error) []error
	survey   func(ctx context.Context, c *Config, l *facts.Cache, opts *SealOptions) (*Data, error)
}

// orderConfigs lists the values of `order`. The first is the default.
func orderConfigs() []orderConfig {
	return []orderConfig{
		{orderNative, (*Config).nativeProblems, surveyNative},
		{orderMegatron, (*Config).megatronProblems, surveyMegatron},
	}
}

// ordered returns the kind of order of the configuration; ok is false if it is not known.
func (c *Config) ordered() (o orderConfig, ok bool) {
	list := orderConfigs()
	for _, o := range list {
		if o.name == cmp.Or(c.Order, list[0].name) {
			return o, true
		}
	}
	return list[0], false
}
