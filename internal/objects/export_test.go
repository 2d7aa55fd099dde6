package objects

import (
	"context"
	"net/http"
	"net/url"
)

// CreateContainer creates the container of a URL az://CONTAINER/.
func CreateContainer(ctx context.Context, address string) error {
	l, err := locate(ctx, address)
	if err != nil {
		return err
	}
	return done(l.store.(*azureStore).send(ctx, http.MethodPut, "", url.Values{"restype": {"container"}}, nil, nil))
}
