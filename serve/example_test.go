package serve_test

import (
	"context"
	"log"
	"net"
	"os"
	"os/signal"

	"mula/blend"
	"mula/serve"
)

// Serve a plan over HTTP until the process is interrupted.
func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	plan, err := blend.ReadPlan("plan.json")
	if err != nil {
		log.Fatal(err)
	}
	data, err := blend.Open(ctx, plan, blend.OpenOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer data.Close()
	service, err := serve.New(ctx, data, serve.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer service.Close()
	listener, err := net.Listen("tcp", "localhost:8080")
	if err != nil {
		log.Fatal(err)
	}
	if err := service.Serve(ctx, listener, serve.Access{}); err != nil {
		log.Fatal(err)
	}
}
